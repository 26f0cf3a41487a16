"""Notebooks as files: their parameters, what an executed copy must and must not contain, and a copy without anything
that changes.

Plain JSON in and out. Not handled here: running a notebook, building pages.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specsel.logs import SpecselError, readable

LOCAL_PATH = re.compile(r"(?:/root/|/home/\w|/Users/\w|/tmp/\w|[A-Z]:\\\\?Users)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}  # neutral: any machine has it
BOOK_TAGS = {"injected-parameters": "remove-cell", "parameters": "hide-input"}  # hide what was passed, fold the rest
SAYS = "ledger.say("  # begins a cell that is prose: its page shows what it says alone


class BookError(SpecselError):
    """Bad input for a build: an unknown parameter, a notebook without the parameters tag, a damaged log, no project
    folder, a folder for the pages that holds something else.
    """


class BuildFailed(Exception):
    """A check failed during a build; the message names notebook and cell, or holds what the builder said."""


def read_notebook(path: Path) -> dict[str, Any]:
    """The JSON of a notebook, or BookError."""
    with readable(path.name, "restore the notebook", BookError):
        return json.loads(path.read_text("utf-8"))


def notebook_parameters(path: Path) -> dict[str, Any]:
    """Name -> default of the parameters cell of a notebook; BookError when no cell has the tag."""
    cells = [c for c in read_notebook(path)["cells"] if "parameters" in c["metadata"].get("tags", [])]
    if not cells:
        raise BookError(
            f"{path.name}: no cell has the tag 'parameters', so parameters would be ignored; tag the cell "
            "that holds the defaults"
        )
    found = {}
    for node in ast.parse("".join(cells[0]["source"])).body:
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        if isinstance(target, ast.Name) and node.value is not None:
            found[target.id] = ast.literal_eval(node.value)
    return found


def check_parameters(notebooks: Sequence[Path], given: Mapping[str, Any]) -> None:
    """BookError that names every given parameter that no notebook has."""
    known = sorted({name for path in notebooks for name in notebook_parameters(path)})
    unknown = [name for name in given if name not in known]
    if unknown:
        near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
        hint = f"did you mean {', '.join(near)}? " if near else ""
        named = ", ".join(repr(name) for name in unknown)
        raise BookError(f"no notebook has the parameter {named}; {hint}Known: {', '.join(known)}")


def outputs(notebook: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every output with the index of its cell."""
    return ((i, output) for i, cell in enumerate(notebook["cells"]) for output in cell.get("outputs", []))


def check_outputs(name: str, notebook: Mapping[str, Any], claims: int) -> None:
    """BuildFailed unless a notebook published claims, printed nothing and shows no path of this machine."""
    for index, output in outputs(notebook):
        kind = output["output_type"]
        if kind == "error":
            raise BuildFailed(f"{name}, cell {index}: {output['ename']}: {output['evalue']}")
        if kind == "stream" and output["name"] == "stdout":
            raise BuildFailed(
                f"{name}, cell {index} prints '{''.join(output['text']).strip()[:80]}'; a page shows results, "
                "and what fails must be raised, so nothing may be printed"
            )
        local = LOCAL_PATH.search(json.dumps(output, ensure_ascii=False)) if kind != "stream" else None
        if local:
            raise BuildFailed(f"{name}, cell {index} shows a path of this machine: {local.group(0)}...")
    if not claims:
        raise BuildFailed(f"{name} published no claim; open it with specsel.open_chapter and use its ledger")


def warnings_of(notebook: Mapping[str, Any]) -> Iterator[str]:
    """What the cells wrote to stderr, without progress frames: for the console, never for a page."""
    for index, output in outputs(notebook):
        if output["output_type"] == "stream" and output["name"] == "stderr":
            lines = [line.split("\r")[-1].strip() for line in "".join(output["text"]).splitlines()]
            yield from (f"cell {index}: {line}" for line in lines if line and not re.search(r"\d%\||it/s", line))


def clean_notebook(notebook: Mapping[str, Any], stem: str, *, for_book: bool) -> dict[str, Any]:
    """A copy without what changes from run to run: times, ids, text on stderr, widget state; code cells are counted
    from 1.

    for_book: hide the cell of injected parameters, fold the defaults, leave of a cell of prose what it says, and put
    what is tagged "answer" behind the first cell, the question; else drop the injected cell, as the repository stores
    it.
    """
    cells, count = [], 0
    for cell in notebook["cells"]:
        tags = [tag for tag in cell["metadata"].get("tags", []) if tag not in ("remove-cell", "remove-input")]
        if "injected-parameters" in tags and not for_book:
            continue
        if for_book:
            tags += [BOOK_TAGS[tag] for tag in tags if BOOK_TAGS.get(tag, tag) not in tags]
            source = "".join(cell["source"]).lstrip()
            says = cell["cell_type"] == "code" and (source.startswith(SAYS) or "answer" in tags and SAYS in source)
            tags = [tag for tag in tags if tag != "hide-input"] + ["remove-input"] if says else tags
        folded = cell["metadata"].get("jupyter", {}).get("source_hidden")
        clean = {
            "cell_type": cell["cell_type"],
            "id": f"{stem}-{len(cells)}",
            "metadata": ({"tags": tags} if tags else {}) | ({"jupyter": {"source_hidden": True}} if folded else {}),
            "source": cell["source"],
        }
        if cell["cell_type"] == "code":
            count += 1
            shown = [o | {"execution_count": count} if "execution_count" in o else o for o in cell["outputs"]]
            clean |= {"execution_count": count, "outputs": [o for o in shown if o["output_type"] != "stream"]}
        cells.append(clean)
    answer = [c for c in cells if for_book and "answer" in c["metadata"].get("tags", [])]
    cells = [*cells[:1], *answer, *(c for c in cells[1:] if c not in answer)]
    return {"cells": cells, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}


def write_clean(notebook: Mapping[str, Any], path: Path, *, for_book: bool) -> None:
    """A clean copy as editors write it: one space of indentation, UTF-8, one final newline."""
    clean = clean_notebook(notebook, path.stem, for_book=for_book)
    path.write_text(json.dumps(clean, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
