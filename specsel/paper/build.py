"""From logs to pages: check the logs, run every notebook, stage the executed copies, build the static book.

Notebooks run in the kernel of the present environment, from the project's folder, with parameters that they know. No
result and no statistic is computed here. `python -m specsel.paper.build` stores what the repository keeps of a built
book: the outputs of the notebooks, the headline figures of the README.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from specsel.logs import LogError, beside, project_folder, read_log, require_complete
from specsel.paper import notebooks
from specsel.paper.chapter import checked
from specsel.paper.claims import Claim, read_claims, render
from specsel.paper.notebooks import BookError, BuildFailed, notebook_parameters

AT_ONCE = min(2, os.cpu_count() or 1)  # notebooks; each has a kernel of one thread
CELL_SECONDS = 900  # time limit of one cell, generous for two slow cores
# its -m form does nothing
JUPYTER_BOOK = (sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_OPTIONS = ("--no-sandbox", "--disable-background-networking")
FIRST = "book/intro"  # the page that opens the book
MARKER = ".specsel-book"  # in a folder of pages: made here, so it may be replaced
README = (
    "<!-- headline figures: written by `make refresh`, compared by a test -->",
    "<!-- end of headline figures -->",
)

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """A progress line."""
    print(line, file=sys.stderr, flush=True)


def build_book(
    run: str | Path | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    root: str | Path | None = None,
    output: str | Path | None = None,
    work: str | Path | None = None,
    pdf: bool = False,
    say: Say = say_on_stderr,
) -> Path:
    """Render the book and return the path of its first page (or of the PDF).

    run: a run folder for all notebooks instead of their default; parameters: further notebook parameters by name;
    output: the folder for the pages (default: html inside work), which must be new, empty, or one that was made here;
    work: intermediate files (default: _build of the project). Raises BookError for a damaged log (naming the file,
    before anything runs), for parameters that no notebook has and for another folder, ParameterError for a value that a
    parameter cannot have, BuildFailed for a failing cell and for a warning of the builder.
    """
    root = project_root(root)
    work = Path(work).absolute() if work else root / "_build"
    pages = Path(output).resolve() if output else work / "html"
    if output:
        check_target(pages)
    browser = find_browser() if pdf else ""
    chapters = list_notebooks(root)
    given = dict(parameters or {}) | ({} if run is None else {"run": _from_root(Path(run), root)})
    notebooks.check_parameters(chapters, given)
    checked(given)
    check_logs(root, chapters, given, say)
    with only_build(work):
        run_notebooks(root, work, chapters, given, say)
        stage(root, work, chapters, say)
        say("building pages ...")
        build_pages(work)
        check_pages(root, work / "out/_build/html")
        replace_folder(work / "out/_build/html", pages)
        if pdf:
            say("printing the PDF ...")
            return print_pdf(work, pages, browser)
    return pages / "index.html"


@contextmanager
def only_build(work: Path) -> Iterator[None]:
    """Two builds in one working folder would mix their results: the second is refused."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BookError(f"{work}: another build is running here; wait for it") from None
        yield


def project_root(root: str | Path | None = None) -> Path:
    """The given folder of a book, or `specsel.logs.project_folder`; BookError when there is no book."""
    found = project_folder() if root is None else Path(root).resolve()
    if found is None or not ((found / "_config.yml").is_file() and (found / "notebooks").is_dir()):
        raise BookError(
            f"{found or Path.cwd()}: has no _config.yml and no notebooks, so there is no book here; run the command "
            "inside a clone"
        )
    return found


def list_notebooks(root: Path) -> list[Path]:
    """The notebooks of the table of contents, in its order."""
    pages = re.findall(r"file:\s*(notebooks/\S+)", (root / "_toc.yml").read_text("utf-8"))
    return [root / f"{page.removesuffix('.ipynb')}.ipynb" for page in pages]


def _from_root(path: Path, root: Path) -> str:
    """A path as notebooks see it, which run in the project's folder; relative, so that no page shows where that
    lies.
    """
    return Path(os.path.relpath(path.absolute(), root)).as_posix()


def check_logs(root: Path, chapters: Sequence[Path], given: Mapping[str, Any], say: Say) -> None:
    """BookError that names the file when a log that a notebook reads is damaged, missing, or not complete: its run, and
    the runs beside it that its parameters name by their ending.
    """
    readers: dict[str, str] = {}
    for path in chapters:
        values = {name: given.get(name, value) for name, value in notebook_parameters(path).items()}
        endings = [value for value in values.values() if str(value).startswith("_")]
        if run := values.get("run"):
            others = [_from_root(other, root) for ending in endings for other in beside(root / run, ending)]
            readers = dict.fromkeys([str(run), *others], path.name) | readers
    for run, notebook in readers.items():
        say(f"checking the log {run} ...")
        try:
            require_complete(read_log(root / run))
        except LogError as error:
            raise BookError(
                f"{error}\nThe log {run} is what {notebook} and the book are made from, so nothing ran. Restore the "
                "file, or name another run with --run"
            ) from None


# ---- execution


def run_notebooks(root: Path, work: Path, chapters: Sequence[Path], given: Mapping[str, Any], say: Say) -> None:
    """Execute a copy of each notebook into work/run, claims into work/values, with a progress line each."""
    for folder in (work / "run", work / "values"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def job(number: int, path: Path) -> None:
        name, started = f"[{number}/{len(chapters)}] {path.stem}", time.monotonic()
        say(f"{name} ...")
        known = notebook_parameters(path)
        run_notebook(path, work / "run" / path.name, {k: v for k, v in given.items() if k in known}, root)
        say(f"{name}: {time.monotonic() - started:.1f} s")

    with kernel_environment(work), ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [pool.submit(job, number, path) for number, path in enumerate(chapters, start=1)]
        try:
            for ended in wait(jobs, return_when=FIRST_EXCEPTION).done:
                ended.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            while any(started.running() for started in jobs):  # a kernel may start as others end
                stop_kernels()
                time.sleep(0.2)
            if isinstance(error, KeyboardInterrupt):
                say("stopped; the pages are as they were")
            raise


def stop_kernels() -> None:
    """End the kernels that this process started, with their workers, so that nobody waits for their cells."""
    import psutil  # comes with the kernels

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ipykernel_launcher" in child.cmdline():
                for process in (*child.children(recursive=True), child):  # a cell may have workers
                    process.kill()


def run_notebook(path: Path, target: Path, parameters: Mapping[str, Any], root: Path) -> None:
    """Execute one notebook with papermill; BuildFailed names the notebook and the cell."""
    import papermill
    from nbclient.exceptions import CellTimeoutError

    try:
        how = {"kernel_name": "python3", "language": "python", "progress_bar": False}
        how |= {"cwd": str(root), "execution_timeout": CELL_SECONDS}
        papermill.execute_notebook(str(path), str(target), parameters=dict(parameters), **how)
    except papermill.PapermillExecutionError as error:
        first = (error.source.strip().splitlines() or [""])[0]
        raise BuildFailed(
            f"{path.name}, cell {error.cell_index}: {error.ename}: {error.evalue}\nThe cell begins: {first}\n"
            f"The executed copy with the traceback: {target}"
        ) from None
    except CellTimeoutError as error:
        raise BuildFailed(f"{path.name}: a cell had no result after {CELL_SECONDS} s\n{error}") from None


@contextmanager
def kernel_environment(work: Path) -> Iterator[None]:
    """A kernel of the present interpreter under the neutral name, whatever the machine has; one thread, fixed
    hashing.
    """
    kernel = work / "jupyter/kernels/python3/kernel.json"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=CRITICAL"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}), encoding="utf-8")
    wanted = {
        "JUPYTER_PATH": os.pathsep.join(filter(None, [str(work / "jupyter"), os.environ.get("JUPYTER_PATH")])),
        "IPYTHONDIR": str(work / "ipython"),
        "SPECSEL_VALUES": str(work / "values"),
        "SPECSEL_CHARTS": "archive",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    with patch.dict(os.environ, wanted):
        yield


# ---- pages


def stage(root: Path, work: Path, chapters: Sequence[Path], say: Say) -> None:
    """The layout of the project again, with executed notebooks: the same bytes for the same results."""
    target = work / "stage"
    for folder in (target, work / "out"):
        shutil.rmtree(folder, ignore_errors=True)
    (target / "notebooks").mkdir(parents=True)
    claims = read_claims(work / "values")
    for path in chapters:
        executed = notebooks.read_notebook(work / "run" / path.name)
        notebooks.check_outputs(path.name, executed, len(claims.get(path.stem, ())))
        for warning in notebooks.warnings_of(executed):
            say(f"{path.name}, {warning}")
        notebooks.write_clean(executed, target / "notebooks" / path.name, for_book=True)
    shutil.copytree(root / "book", target / "book")
    for name in ("_config.yml", "_toc.yml"):
        shutil.copyfile(root / name, target / name)


def build_pages(work: Path, builder: str = "html") -> None:
    """Jupyter Book with warnings as errors; BuildFailed holds what it said."""
    where = [str(work / "stage"), "--path-output", str(work / "out"), "--builder", builder]
    told = {"text": True, "encoding": "utf-8", "errors": "replace", "capture_output": True}
    environment = os.environ | {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run([*JUPYTER_BOOK, *where, "-q", "-W", "-n", "--keep-going"], env=environment, **told)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise BuildFailed("the book has warnings, which count as errors:\n" + "\n".join(said[-40:]))


def check_pages(root: Path, pages: Path) -> None:
    """BuildFailed unless every page of the table of contents was written."""
    wanted = re.findall(r"(?:file|root):\s*(\S+)", (root / "_toc.yml").read_text("utf-8"))
    missing = [page for page in wanted if not (pages / f"{page}.html").is_file()]
    if missing:
        raise BuildFailed(f"the builder wrote no page for {', '.join(missing)}")


def check_target(pages: Path) -> None:
    """BookError unless a folder for pages is new, empty, or one of ours."""
    if pages.exists() and not (pages / MARKER).is_file() and not (pages.is_dir() and not any(pages.iterdir())):
        raise BookError(f"{pages}: holds something that this command did not make; name a new or an empty folder")


def replace_folder(source: Path, target: Path) -> None:
    """Put a copy of a folder in place of an old one, which stays until the copy is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".specsel-") as scratch:
        fresh, old = Path(scratch) / "fresh", Path(scratch) / "old"
        shutil.copytree(source, fresh)
        (fresh / MARKER).write_text("Pages made by `specsel book`, which may replace this folder.\n", encoding="utf-8")
        if target.exists():
            target.rename(old)
        fresh.rename(target)


def find_browser() -> str:
    """Path of an installed Chromium; BookError where it or the package that drives it is missing."""
    if importlib.util.find_spec("playwright") is None:
        raise BookError("the PDF needs the package playwright, which only .venv-all has; use `make pdf`")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise BookError(f"the PDF needs Chromium; none of {', '.join(BROWSERS)} is installed")
    return found


def print_pdf(work: Path, pages: Path, browser: str) -> Path:
    """The whole book as one PDF beside its pages, printed by a browser from a build on a single page."""
    from playwright.sync_api import sync_playwright

    build_pages(work, "singlehtml")
    single = work / "out/_build/singlehtml"
    source = (single / FIRST).with_suffix(".html")
    source = source.replace(single / source.name)  # its links are relative to the top
    drawn = "() => [...document.querySelectorAll('.vl-chart')].every(e => e.dataset.ready)"
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=list(BROWSER_OPTIONS))
        page = chromium.new_page(viewport={"width": 680, "height": 960})  # as wide as the paper: charts fit it
        page.goto(source.as_uri())
        page.wait_for_function(drawn, timeout=120_000)
        page.evaluate("() => window.MathJax ? MathJax.startup.promise : null")
        margin = dict.fromkeys(("top", "bottom", "left", "right"), "16mm")
        page.pdf(path=str(pages / "specsel.pdf"), format="A4", outline=True, tagged=True, margin=margin)
        chromium.close()
    return pages / "specsel.pdf"


# ---- what the repository stores


def headline_table(ledger: Mapping[str, Mapping[str, Any]], page: str) -> str:
    """The questions of the first page with their answers, as the README shows them; ledger: the content of claims.json,
    page: the source of the first page."""

    def answer(role: re.Match) -> str:
        return render(Claim.from_dict(ledger[role.group(1)]))

    return "\n".join(re.sub(r"\{claim\}`([^`]+)`", answer, row) for row in page.splitlines() if row.startswith("|"))


def readme_parts(text: str) -> tuple[str, str, str]:
    """The README before, between and after the marks."""
    before, _, rest = text.partition(README[0])
    between, _, after = rest.partition(README[1])
    return before, between.strip(), after


def refresh(root: str | Path | None = None, say: Say = say_on_stderr) -> None:
    """Build with the defaults; store the outputs in the repository's notebooks and the headline figures in the
    README.
    """
    root = project_root(root)
    page = build_book(root=root, say=say)
    for path in list_notebooks(root):
        notebooks.write_clean(notebooks.read_notebook(root / "_build/run" / path.name), path, for_book=False)
    readme = root / "README.md"
    before, _, after = readme_parts(readme.read_text("utf-8"))
    first = (root / FIRST).with_suffix(".md").read_text("utf-8")
    table = headline_table(json.loads((page.parent / "claims.json").read_text("utf-8")), first)
    readme.write_text(f"{before}{README[0]}\n\n{table}\n\n{README[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    refresh()
