"""Settings of the whole suite: derandomised examples, and no engine tests where torch is not installed."""

import sys
from importlib.util import find_spec

import pytest
from hypothesis import settings

from specsel import cli

settings.register_profile("checks", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)  # pytest --hypothesis-profile=random
settings.load_profile("checks")

collect_ignore = [] if find_spec("torch") else ["engine"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The cells of the notebooks, which nbval collects and compares with what they store, are slow tests."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def specsel(monkeypatch, capsys):
    """Run one command line; returns (exit status, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["specsel", *map(str, words)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        return status, *capsys.readouterr()

    return run
