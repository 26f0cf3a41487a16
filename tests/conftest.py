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
    """The notebooks under nbval (their stored outputs against fresh ones) are slow."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("slow")


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


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """The book as `make book` renders it, from the committed run: its working folder."""
    return _built(tmp_path_factory.mktemp("measured"), None)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """The book of somebody else's small pool, without confidences and timings: its working folder."""
    from test_notebooks import foreign_log

    work = tmp_path_factory.mktemp("foreign")
    return _built(work, foreign_log(work / "log"), n_resamples=100, policy_resamples=100, seeds=2, tuned=False)


def _built(work, run, **parameters):
    """A working folder of the whole book, every notebook executed once."""
    from specsel.paper.build import build_book

    (work / "said").write_text("", encoding="utf-8")
    with open(work / "said", "a", encoding="utf-8") as said:
        build_book(run, parameters=parameters, work=work, say=lambda line: print(line, file=said, flush=True))
    return work


@pytest.fixture(scope="session", params=["measured", "foreign"])
def built(request):
    """Either book."""
    return request.getfixturevalue(request.param)
