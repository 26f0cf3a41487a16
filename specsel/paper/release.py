"""What the repository stores of a built book: the headline figures of the README, the outputs that the repository's
notebooks store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsel.paper.build import Say, build_book, list_notebooks, project_root, say_on_stderr
from specsel.paper.claims import Claim, render
from specsel.paper.pages import FIRST
from specsel.paper.staging import clean_notebook, read_notebook, write_notebook

MARKS = ("<!-- headline figures: written by `make refresh`, compared by a test -->", "<!-- end of headline figures -->")


def headline_table(ledger: Mapping[str, Mapping[str, Any]]) -> str:
    """The headline claims that the first page cites, as the README shows them; ledger: the content of claims.json."""
    cited = [
        {k: v for k, v in entry.items() if k != "cited_in"} for entry in ledger.values() if FIRST in entry["cited_in"]
    ]
    claims = sorted((Claim.from_dict(entry) for entry in cited if entry["headline"]), key=lambda claim: claim.name)
    rows = [f"| {claim.name.replace('_', ' ')} | {render(claim, counts=True)} |" for claim in claims]
    return "\n".join(["| figure | value with interval, label, requests |", "|---|---|", *rows])


def readme_parts(text: str) -> tuple[str, str, str]:
    """The README before, between and after the marks."""
    before, _, rest = text.partition(MARKS[0])
    between, _, after = rest.partition(MARKS[1])
    return before, between.strip(), after


def refresh(root: str | Path | None = None, say: Say = say_on_stderr) -> None:
    """Build with the defaults; store the outputs in the repository's notebooks and the headline figures in the
    README.
    """
    root = project_root(root)
    page = build_book(root=root, say=say)
    for path in list_notebooks(root):
        write_notebook(path, clean_notebook(read_notebook(root / "_build/run" / path.name), path.stem, for_book=False))
    readme = root / "README.md"
    before, _, after = readme_parts(readme.read_text("utf-8"))
    table = headline_table(json.loads((page.parent / "claims.json").read_text("utf-8")))
    readme.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    refresh()
