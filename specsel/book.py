"""From logs to pages: run every notebook, stage the executed copies, build the static book.

The logs are checked before anything runs; notebooks run in the kernel of the present environment, from the project's folder, with
parameters that they know. No result and no statistic is computed here.
"""
from __future__ import annotations

import ast
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specsel.log import validate
from specsel.records import SpecselError

CELL_SECONDS = 900  # time limit of one cell, generous for two slow cores
TEXT_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOME_PATH = re.compile(r"(?:/root/|/home/\w|/Users/\w|/tmp/\w|[A-Z]:\\\\?Users)")
README_MARKS = ("<!-- headline: written by `make refresh` -->", "<!-- end of headline -->")


class BookError(SpecselError):
    """Bad input for a build: an unknown parameter, a notebook without the parameters tag, no project folder."""


class BuildFailed(Exception):
    """A check failed during the build; the message names notebook and cell, or holds what the builder said."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build_book(run: str | Path | None = None, *, parameters: Mapping[str, Any] | None = None, root: str | Path | None = None,
               output: str | Path | None = None, pdf: bool = False, say: Callable[[str], None] = _say) -> Path:
    """Render the book and return the path of its first page (or of the PDF).

    run: a run folder for all notebooks instead of their default. parameters: further notebook parameters by name. output: the folder for
    pages (default: _build/html of the project). Raises LogError naming a damaged file before anything runs, BookError for parameters that
    no notebook has, BuildFailed for a failing cell or a warning of the builder.
    """
    root = project_root(root)
    build = root / "_build"
    html = Path(output).absolute() if output else build / "html"
    notebooks = list_notebooks(root)
    given = dict(parameters or {}) | ({} if run is None else {"run": _portable(Path(run), root)})
    check_parameters(notebooks, given)
    check_logs(root, notebooks, given, say)
    run_notebooks(root, build, notebooks, given, say)
    stage(root, build, notebooks)
    say("building pages ...")
    _sphinx(build)
    check_pages(root, build / "out/_build/html")
    _replace(build / "out/_build/html", html)
    return print_pdf(build, html, say) if pdf else html / "index.html"


def project_root(root: str | Path | None = None) -> Path:
    """The folder with _config.yml: the given one, else the present folder or one above it, else where the package was installed from."""
    places = [Path(root)] if root else [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parent.parent]
    for place in places:
        if (place / "_config.yml").is_file() and (place / "notebooks").is_dir():
            return place.resolve()
    raise BookError(f"no book found: {places[0]} has no _config.yml and notebooks/; run the command inside a clone of the project")


def _portable(path: Path, root: Path) -> str:
    """A path as the notebooks, which run in the project's folder, see it; relative, so that no page shows where the project lies."""
    return Path(os.path.relpath(path.absolute(), root)).as_posix()


# ---- parameters


def list_notebooks(root: Path) -> list[Path]:
    """The notebooks of the table of contents, in its order."""
    pages = re.findall(r"file:\s*(notebooks/\S+)", (root / "_toc.yml").read_text("utf-8"))
    return [root / f"{page.removesuffix('.ipynb')}.ipynb" for page in pages]


def notebook_parameters(path: Path) -> dict[str, Any]:
    """Name -> default of the parameters cell of a notebook; BookError when no cell has the tag."""
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if "parameters" in c["metadata"].get("tags", [])]
    if not cells:
        raise BookError(f"{path.name}: no cell has the tag 'parameters', so parameters would be ignored; tag the cell with the defaults")
    found = {}
    for node in ast.parse("".join(cells[0]["source"])).body:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
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
        raise BookError(f"no notebook has the parameter {', '.join(repr(name) for name in unknown)}; {hint}Known: {', '.join(known)}")


def check_logs(root: Path, notebooks: Sequence[Path], given: Mapping[str, Any], say: Callable[[str], None] = _say) -> None:
    """BookError with the first faults, each naming its file, when a run folder that a notebook reads is damaged."""
    runs = {}
    for path in notebooks:
        defaults = notebook_parameters(path)
        if "run" in defaults:
            runs.setdefault(str(given.get("run", defaults["run"])), path.name)
    for run, notebook in runs.items():
        say(f"checking the log {run} ...")
        faults = validate(root / run)
        if faults:
            more = f"\n... and {len(faults) - 3} more; `specsel log validate {run}` lists all" if len(faults) > 3 else ""
            raise BookError(f"{notebook} cannot run, its log {run} is damaged:\n" + "\n".join(str(f) for f in faults[:3]) + more)


# ---- execution


def run_notebooks(root: Path, build: Path, notebooks: Sequence[Path], given: Mapping[str, Any], say: Callable[[str], None] = _say) -> None:
    """Execute a copy of each notebook into build/run, claims into build/values, with a progress line each."""
    for folder in (build / "run", build / "values"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    with _kernel_environment(build):
        for number, path in enumerate(notebooks, start=1):
            say(f"[{number}/{len(notebooks)}] {path.stem} ...")
            started = time.monotonic()
            run_notebook(path, build / "run" / path.name, {k: v for k, v in given.items() if k in notebook_parameters(path)}, root)
            say(f"[{number}/{len(notebooks)}] {path.stem}: {time.monotonic() - started:.1f} s")


def run_notebook(path: Path, target: Path, parameters: Mapping[str, Any], root: Path) -> None:
    """Execute one notebook with papermill; BuildFailed names the notebook and the cell."""
    import papermill
    from nbclient.exceptions import CellTimeoutError

    try:
        papermill.execute_notebook(str(path), str(target), parameters=dict(parameters), kernel_name="python3", language="python", cwd=str(root),
                                   progress_bar=False, execution_timeout=CELL_SECONDS)
    except papermill.PapermillExecutionError as error:
        raise BuildFailed(f"{path.name}, cell {error.cell_index}: {error.ename}: {error.evalue}\n"
                          f"The cell begins: {error.source.strip().splitlines()[0]}\nThe executed copy with the traceback: {target}") from None
    except CellTimeoutError as error:
        raise BuildFailed(f"{path.name}, {_running_cell(target)}: no result after {CELL_SECONDS} s\n{error}") from None


def _running_cell(target: Path) -> str:
    cells = json.loads(target.read_text("utf-8"))["cells"] if target.exists() else []
    return next((f"cell {i}" for i, c in enumerate(cells) if c["metadata"].get("papermill", {}).get("status") in ("running", "failed")), "some cell")


@contextmanager
def _kernel_environment(build: Path) -> Iterator[None]:
    """A kernel of the present interpreter under the neutral name, whatever kernels the machine has; one thread, fixed hashing."""
    kernel = build / "jupyter/kernels/python3/kernel.json"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}), encoding="utf-8")
    wanted = {"JUPYTER_PATH": os.pathsep.join(filter(None, [str(build / "jupyter"), os.environ.get("JUPYTER_PATH")])),
              "IPYTHONDIR": str(build / "ipython"), "SPECSEL_VALUES": str(build / "values"), "SPECSEL_CHARTS": "archive",
              "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# ---- staging


def stage(root: Path, build: Path, notebooks: Sequence[Path]) -> None:
    """The layout of the project again, with executed notebooks: the same bytes for the same results."""
    target = build / "stage"
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(build / "out", ignore_errors=True)
    (target / "notebooks").mkdir(parents=True)
    for path in notebooks:
        executed = json.loads((build / "run" / path.name).read_text("utf-8"))
        check_outputs(path.name, executed, _claims_of(build, path.stem))
        write_notebook(target / "notebooks" / path.name, clean_notebook(executed, path.stem, for_book=True))
    shutil.copytree(root / "book", target / "book")
    for name in ("_config.yml", "_toc.yml"):
        shutil.copyfile(root / name, target / name)


def _claims_of(build: Path, stem: str) -> int:
    path = build / "values" / f"{stem}.json"
    return len(json.loads(path.read_text("utf-8"))) if path.exists() else 0


def check_outputs(name: str, notebook: Mapping[str, Any], claims: int) -> None:
    """BuildFailed unless a notebook published claims, shows a chart, printed nothing and shows no path of this machine."""
    outputs = [(i, output) for i, cell in enumerate(notebook["cells"]) for output in cell.get("outputs", [])]
    for index, output in outputs:
        text = json.dumps(output, ensure_ascii=False)
        if output["output_type"] == "error":
            raise BuildFailed(f"{name}, cell {index}: {output['ename']}: {output['evalue']}")
        if output["output_type"] == "stream" and output["name"] == "stdout":
            raise BuildFailed(f"{name}, cell {index} prints '{''.join(output['text']).strip()[:80]}'; a page shows results and a failure is raised, "
                              "so nothing may be printed")
        if output["output_type"] != "stream" and HOME_PATH.search(text):
            raise BuildFailed(f"{name}, cell {index} shows a path of this machine: {HOME_PATH.search(text).group(0)}...")
    if not claims:
        raise BuildFailed(f"{name} published no claim; call specsel.open_ledger('{Path(name).stem}') and specsel.publish")
    if not any("vegalite" in key for _, output in outputs for key in output.get("data", {})):
        raise BuildFailed(f"{name} shows no chart; call specsel.charts.use() in its first cell and end a cell with a chart")


def clean_notebook(notebook: Mapping[str, Any], stem: str, *, for_book: bool) -> dict[str, Any]:
    """A copy without anything that changes from run to run: times, ids, counters, progress text, widget state.

    for_book: hide the cell of injected parameters and fold the one of the defaults; else drop the injected cell, as the repository stores it.
    """
    cells = []
    for cell in notebook["cells"]:
        tags = [tag for tag in cell["metadata"].get("tags", []) if tag not in ("remove-cell", "hide-input")]
        if "injected-parameters" in tags and not for_book:
            continue
        extra = {"injected-parameters": ["remove-cell"], "parameters": ["hide-input"]} if for_book else {}
        tags += [new for tag, found in extra.items() if tag in tags for new in found]
        clean = {"cell_type": cell["cell_type"], "id": f"{stem}-{len(cells)}", "metadata": {"tags": tags} if tags else {}, "source": cell["source"]}
        if cell["cell_type"] == "code":
            clean |= {"execution_count": None, "outputs": [_clean_output(o) for o in cell["outputs"] if o["output_type"] != "stream"]}
        cells.append(clean)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def _clean_output(output: Mapping[str, Any]) -> dict[str, Any]:
    return {**output, **({"execution_count": None} if "execution_count" in output else {})}


def write_notebook(path: Path, notebook: Mapping[str, Any]) -> None:
    """Notebook JSON as editors write it: one space of indentation, UTF-8, one final newline."""
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- pages


def _sphinx(build: Path, builder: str = "html") -> None:
    """Jupyter Book with warnings as errors; BuildFailed holds what it said."""
    command = ["build", str(build / "stage"), "--path-output", str(build / "out"), "--builder", builder, "-q", "-W", "-n", "--keep-going"]
    done = subprocess.run([sys.executable, "-c", "from jupyter_book.cli.main import main; main()", *command], text=True, encoding="utf-8",
                          errors="replace", capture_output=True, env=os.environ | {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0"})
    if done.returncode:
        raise BuildFailed("the book has warnings, which count as errors:\n" + "\n".join((done.stdout + done.stderr).strip().splitlines()[-40:]))


def check_pages(root: Path, html: Path) -> None:
    """BuildFailed unless every page of the table of contents was written."""
    wanted = re.findall(r"(?:file|root):\s*(\S+)", (root / "_toc.yml").read_text("utf-8"))
    missing = [page for page in wanted if not (html / f"{page.removesuffix('.ipynb').removesuffix('.md')}.html").is_file()]
    if missing:
        raise BuildFailed(f"the builder wrote no page for {', '.join(missing)}")


def _replace(source: Path, target: Path) -> None:
    """Put the new pages in place of the old ones; the old ones stay until the copy is complete."""
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, fresh)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def print_pdf(build: Path, html: Path, say: Callable[[str], None] = _say) -> Path:
    """The whole book as one PDF beside its pages, printed by an installed Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise BookError("the PDF needs the package playwright, which is in the environment .venv-all: use `make pdf`") from None
    browser = find_browser()
    if browser is None:
        raise BookError(f"the PDF needs Chromium; none of {', '.join(TEXT_BROWSERS)} is installed")
    say("printing the PDF ...")
    _sphinx(build, "singlehtml")
    single = build / "out/_build/singlehtml"
    page_file = next(single.rglob("intro.html"))
    if page_file.parent != single:  # its links are relative to the top
        page_file = page_file.replace(single / page_file.name)
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-background-networking"])
        page = chromium.new_page(viewport={"width": 680, "height": 960})
        page.goto(page_file.as_uri())
        page.wait_for_function("() => [...document.querySelectorAll('.vl-chart')].every(e => e.dataset.ready)", timeout=120_000)
        page.evaluate("() => window.MathJax ? MathJax.startup.promise : null")
        page.pdf(path=str(html / "specsel.pdf"), format="A4", outline=True, tagged=True,
                 margin={side: "16mm" for side in ("top", "bottom", "left", "right")})
        chromium.close()
    return html / "specsel.pdf"


def find_browser() -> str | None:
    """Path of an installed Chromium, or None."""
    return next((found for name in TEXT_BROWSERS if (found := shutil.which(name))), None)


# ---- what the repository stores


def readme_block(claims: Mapping[str, Mapping[str, Any]]) -> str:
    """The headline table of the README from claims.json, one line for each headline claim that the introduction cites."""
    from specsel.claims import Claim, render

    rows = [(entry["name"], render(Claim.from_dict({k: v for k, v in entry.items() if k != "cited_in"}), counts=True))
            for _, entry in sorted(claims.items()) if entry["headline"] and "book/intro" in entry["cited_in"]]
    return "\n".join(["| figure | value |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def update_readme(root: Path, html: Path) -> None:
    """Write the headline figures of a built book between the marks of the README."""
    path = root / "README.md"
    text = path.read_text("utf-8")
    head, _, rest = text.partition(README_MARKS[0])
    tail = rest.partition(README_MARKS[1])[2]
    block = readme_block(json.loads((html / "claims.json").read_text("utf-8")))
    path.write_text(f"{head}{README_MARKS[0]}\n{block}\n{README_MARKS[1]}{tail}", encoding="utf-8")


def refresh(root: str | Path | None = None, say: Callable[[str], None] = _say) -> None:
    """Build the book with the defaults, store the outputs in the notebooks of the repository and the headlines in the README."""
    page, root = build_book(root=root, say=say), project_root(root)
    for path in list_notebooks(root):
        executed = json.loads((root / "_build/run" / path.name).read_text("utf-8"))
        write_notebook(path, clean_notebook(executed, path.stem, for_book=False))
    update_readme(root, page.parent)


if __name__ == "__main__":
    refresh()
