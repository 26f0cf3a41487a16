"""Which drafter should speculate on the next block? Logs, exact replay, selectors and the claims of a computed book.

`import specsel` loads nothing: names and submodules resolve on first use, and only `specsel.engine` needs torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "logs": (
        "located",
        "read_log",
        "read_logs",
        "write_log",
        "block_view",
        "PositionLog",
        "LogError",
        "SpecselError",
    ),
    "stats": ("Estimate", "bootstrap_requests", "ratio"),
    "paper.claims": ("Claim", "Label"),
    "paper.chapter": ("open_chapter",),
    "paper.build": ("build_book",),
}
_NAMES = {name: module for module, names in _HOME.items() for name in names}
__all__ = ["__version__", *_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return getattr(import_module(f"specsel.{_NAMES[name]}"), name)
    try:
        return import_module(f"specsel.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"specsel.{name}":
            raise
        raise AttributeError(f"specsel has no name '{name}'") from None
