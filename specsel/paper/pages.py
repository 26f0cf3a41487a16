"""Pages from staged sources: the static site with warnings as errors, and the whole book as one PDF."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from specsel.paper.staging import BookError, BuildFailed

JUPYTER_BOOK = (
    sys.executable,
    "-c",
    "from jupyter_book.cli.main import main; main()",
    "build",
)  # its -m form does nothing
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_OPTIONS = ("--no-sandbox", "--disable-background-networking")
FIRST = "book/intro"  # the page that opens the book


def build_pages(work: Path, builder: str = "html") -> None:
    """Jupyter Book with warnings as errors; BuildFailed holds what it said."""
    options = [
        str(work / "stage"),
        "--path-output",
        str(work / "out"),
        "--builder",
        builder,
        "-q",
        "-W",
        "-n",
        "--keep-going",
    ]
    done = subprocess.run(
        [*JUPYTER_BOOK, *options],
        text=True,
        encoding="utf-8",
        errors="replace",
        capture_output=True,
        env=os.environ | {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0"},
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise BuildFailed("the book has warnings, which count as errors:\n" + "\n".join(said[-40:]))


def check_pages(root: Path, pages: Path) -> None:
    """BuildFailed unless every page of the table of contents was written."""
    wanted = re.findall(r"(?:file|root):\s*(\S+)", (root / "_toc.yml").read_text("utf-8"))
    missing = [page for page in wanted if not (pages / f"{page}.html").is_file()]
    if missing:
        raise BuildFailed(f"the builder wrote no page for {', '.join(missing)}")


def replace_folder(source: Path, target: Path) -> None:
    """Put a copy of a folder in place of an old one, which stays until the copy is complete."""
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, fresh)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def find_browser() -> str | None:
    """Path of an installed Chromium, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def print_pdf(work: Path, pages: Path) -> Path:
    """The whole book as one PDF beside its pages, printed by an installed Chromium from a build on a single page."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise BookError("the PDF needs the package playwright, which only .venv-all has; use `make pdf`") from None
    browser = find_browser()
    if browser is None:
        raise BookError(f"the PDF needs Chromium; none of {', '.join(BROWSERS)} is installed")
    build_pages(work, "singlehtml")
    single = work / "out/_build/singlehtml"
    source = (single / FIRST).with_suffix(".html")
    source = source.replace(single / source.name)  # its links are relative to the top
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=list(BROWSER_OPTIONS))
        page = chromium.new_page(viewport={"width": 680, "height": 960})  # as wide as the paper: charts fit it
        page.goto(source.as_uri())
        page.wait_for_function(
            "() => [...document.querySelectorAll('.vl-chart')].every(e => e.dataset.ready)", timeout=120_000
        )
        page.evaluate("() => window.MathJax ? MathJax.startup.promise : null")
        page.pdf(
            path=str(pages / "specsel.pdf"),
            format="A4",
            outline=True,
            tagged=True,
            margin=dict.fromkeys(("top", "bottom", "left", "right"), "16mm"),
        )
        chromium.close()
    return pages / "specsel.pdf"
