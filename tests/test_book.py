"""The book: prose without typed results, and a built book that keeps what it promises to its readers."""

import contextlib
import functools
import http.server
import json
import re
import shutil
import threading
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from test_notebooks import NOTEBOOKS, ROOT, simulated

from specsel.costs import best_of_n
from specsel.logs import read_log
from specsel.paper import notebooks
from specsel.paper.build import BROWSER_OPTIONS, BROWSERS, headline_table, readme_parts
from specsel.paper.claims import Claim, format_value, read_claims, render
from specsel.stats import Resampling
from specsel.study.headline import headline

PAGES = sorted((ROOT / "book").glob("*.md"))
RUN = ROOT / "data/runs/campaign"
LITERAL = "<!-- literal:"
NOT_PROSE = re.compile(
    r"^```.*?^```|^\$\$.*?^\$\$[^\n]*|`[^`]*`|\$[^$\n]+\$|\]\([^)]*\)|<[^>]+>|\{[a-z:]+\}`[^`]*`|^#+ .*$",
    re.MULTILINE | re.DOTALL,
)


def typed_results(text: str) -> list[str]:
    """Lines of prose that hold a decimal number or two adjacent digits and do not say that they are literal."""
    lines = [line for line in text.splitlines() if LITERAL not in line]
    prose = NOT_PROSE.sub(" ", "\n".join(lines))
    return [line for line in prose.splitlines() if re.search(r"\d+\.\d+|\d\d", line)]


# ---- prose


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_prose_contains_no_hand_typed_results(path):
    assert typed_results(path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_prose_of_notebooks_contains_no_hand_typed_results(path):
    prose = [cell["source"] for cell in notebooks.read_notebook(path)["cells"] if cell["cell_type"] == "markdown"]
    assert typed_results("\n\n".join("".join(source) for source in prose)) == []


def test_the_lint_finds_what_it_should_and_leaves_the_rest():
    """Numbers in prose are found; claims, code, formulas, links, headings and declared literals are not."""
    assert typed_results("The gain is 13.3 %.") and typed_results("It took 45 requests.")
    fine = [
        "{claim}`04_selector.skill:.2f`",
        "`0.25`",
        "$x = 0.25$",
        "# Chapter 12",
        "[a](https://x/2024)",
        "three of 4",
        "since 2017 <!-- literal: a year -->",
        "```\n0.25\n```",
        "$$\nx = 12\n$$ (eq)",
    ]
    assert [text for text in fine if typed_results(text)] == []


def test_no_sentence_of_the_book_names_a_dominant_arm():
    """Which arm is dominant is a result: prose outside the data card and the replication never names one."""
    for path in PAGES:
        if path.stem not in ("replication", "data_card"):
            assert not re.search(r"\b(dflash|eagle|ngram|cascade)\b", NOT_PROSE.sub(" ", path.read_text("utf-8"))), (
                path.name
            )


def test_every_word_of_the_vocabulary_is_explained():
    text = (ROOT / "book/reading.md").read_text("utf-8")
    for word in (
        "target",
        "drafter",
        "request",
        "workload",
        "position",
        "block",
        "accepted",
        "emitted",
        "bonus",
        "block efficiency",
        "best fixed",
        "headroom",
        "oracle gap",
        "route",
        "redraft",
        "rho",
        "alpha",
    ):
        assert word in text, word


def test_the_example_of_the_data_card_is_a_log(tmp_path):
    lines = re.search(r"```json\n(.*?)```", (ROOT / "book/data_card.md").read_text("utf-8"), re.DOTALL).group(1)
    (tmp_path / "example.jsonl").write_text(lines, encoding="utf-8")
    log = read_log(tmp_path / "example.jsonl")
    assert log.complete and log.arms == ("lookup", "head") and log.workloads == ("sql",)


# ---- built books


@pytest.fixture(scope="session")
def book(built):
    """The folder of the pages, of either book."""
    return built / "html"


@pytest.fixture(scope="session")
def ledger(book):
    return json.loads((book / "claims.json").read_text("utf-8"))


def pages(book: Path) -> dict[str, str]:
    """Every page by its path; templates of the theme among the static files are none."""
    files = [path for path in sorted(book.rglob("*.html")) if "_static" not in path.parts]
    return {str(path.relative_to(book)): path.read_text("utf-8") for path in files}


def without_code(page: str) -> str:
    return re.sub(r"<div class=\"highlight[^>]*>.*?</div>", " ", without_scripts(page), flags=re.DOTALL)


def without_scripts(page: str) -> str:
    return re.sub(r"<script\b.*?</script>|<style\b.*?</style>", " ", page, flags=re.DOTALL)


@pytest.mark.slow
def test_every_page_of_the_contents_is_there(book):
    wanted = re.findall(r"(?:file|root):\s*(\S+)", (ROOT / "_toc.yml").read_text("utf-8"))
    assert [name for name in wanted if not (book / f"{name}.html").is_file()] == []


@pytest.mark.slow
def test_no_page_asks_another_server_for_anything(book):
    """Scripts, styles, pictures and frames are local; only links that a reader follows lead elsewhere."""
    for name, page in pages(book).items():
        found = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'>]+", page)
        found += re.findall(
            r"<link\b[^>]*rel=[\"']?(?:stylesheet|preload|icon)[^>]*href=[\"']?(?:https?:)?//[^\"'>]+", page
        )
        found += re.findall(r"(?:cdn\.jsdelivr\.net|unpkg\.com|cdnjs\.cloudflare\.com|fonts\.googleapis\.com)", page)
        assert found == [], name


@pytest.mark.slow
def test_no_page_shows_what_only_a_machine_understands(book):
    """No traceback, no numpy repr, no object instead of a picture, no path, no progress frame, no unresolved claim."""
    bad = (
        r"Traceback \(most recent call last\)|np\.(?:float|int|str_|bool)|alt\.[A-Za-z]*Chart\(|&lt;Figure size"
        r"|\d+%\|[^<\n]{0,80}\||it/s\]|/root/|/home/\w|/tmp/\w|\{claim|class=\"problematic|>\s*(?:nan|NaN|None|inf)\s*<|Warning:"
    )
    for name, page in pages(book).items():
        body = without_code(page)
        assert re.search(bad, body) is None, (name, re.search(bad, body))


@pytest.mark.slow
def test_every_chart_is_described_has_data_and_a_still_picture(book):
    """Readers without scripts see the picture; those who do not see it hear the description; below stand the values."""
    charts = 0
    for name, page in pages(book).items():
        for figure in re.findall(r"<figure class=\"vl-chart\".*?</figure>", page, flags=re.DOTALL):
            spec = json.loads(
                re.search(r"<script type=\"application/json\">(.*?)</script>", figure, re.DOTALL).group(1),
                parse_constant=pytest.fail,
            )
            assert len(spec["description"]) > 40, name
            rows = [row for rows in spec["datasets"].values() for row in rows]
            assert 0 < len(rows) <= 5000, (name, len(rows))
            picture = (book / name).parent / unescape(re.search(r"<img src=\"([^\"]+)\"", figure).group(1))
            assert picture.resolve().read_text("utf-8").startswith("<svg"), name
            assert "Values behind this chart" in figure
            charts += 1
    assert charts >= 5


@pytest.mark.slow
def test_pages_stay_light(book):
    assert [name for name, page in pages(book).items() if len(page.encode()) > 6e6] == []


@pytest.mark.slow
def test_the_ledger_lists_every_claim_with_label_and_origin(ledger):
    """claims.json: what pages and cells show, with the pages that do."""
    assert {key.partition(".")[0] for key in ledger} == {path.stem for path in NOTEBOOKS}
    for key, claim in ledger.items():
        assert claim["label"] in ("MEASURED", "SIM", "REPORTED") and claim["origin"], key
        if claim["headline"] and not isinstance(claim["value"], str):
            assert claim["low"] is not None and claim["n"] and claim["method"], key
    assert any("book/intro" in claim["cited_in"] for claim in ledger.values())


@pytest.mark.slow
def test_a_quantity_has_one_value_one_interval_and_one_unit_in_the_whole_book(ledger):
    """Whatever chapter shows it: the same quantity of the same requests is the same number."""
    seen, units = {}, {}
    for key, claim in ledger.items():
        name = claim["quantity"], *claim["keys"]
        known = seen.setdefault(name, claim)
        for part in ("value", "low", "high", "level", "label", *(() if claim["low"] is None else ("n",))):
            assert known[part] == claim[part], (key, part, known[part], claim[part])
        if not isinstance(claim["value"], str):
            assert units.setdefault(claim["quantity"], claim["unit"]) == claim["unit"], key


@pytest.mark.slow
def test_the_stated_method_is_that_of_the_interval(ledger):
    """An interval of requests has the resamples, the seed and the level of the book, and where policies are compared
    those that their p-values need; another one says what was drawn.
    """
    of_requests = {"BCa", "percentile", "degenerate", "BCa, workloads of one request merged"}
    stated = set()
    for key, claim in ledger.items():
        if claim["low"] is None or claim["label"] == "REPORTED":
            continue
        assert claim["low"] <= claim["high"] and claim["method"], key
        if claim["method"] in of_requests:
            stated.add((claim["seed"], claim["level"]))
            assert claim["n_resamples"] in (100, 10_000) or key.startswith("03_replay."), key
    assert len(stated) == 1, stated


@pytest.mark.slow
def test_every_number_on_a_page_is_one_of_the_ledger(book, ledger):
    """What stands between value and label is what the ledger holds under that name, whatever page shows it."""
    shown = 0
    for name, page in pages(book).items():
        for key, inside in re.findall(r'data-claim="([^"]*)">(.*?)</span></span>', page, re.DOTALL):
            claim = Claim.from_dict({k: v for k, v in ledger[unescape(key)].items() if k != "cited_in"})
            text = unescape(re.sub(r"<[^>]+>", "", inside)).strip().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
            value = format_value(claim.value, claim.unit)
            assert text.startswith(value.replace(" tokens/block", "")) or re.match(r"[-\d.,]+", text), (name, key, text)
            assert claim.low is None or "[" not in text or render(claim).split("[")[1].split("]")[0] in text, (
                name,
                key,
            )
            shown += 1
    assert shown > 50


@pytest.mark.slow
def test_the_published_figures_stand_beside_ours_with_their_label(measured):
    page = re.sub(r"<[^>]+>", "", (measured / "html/notebooks/07_replication.html").read_text("utf-8"))
    assert "13.3 % [12.3, 14.2] [REPORTED]" in re.sub(r"\s+", " ", unescape(page))


@pytest.mark.slow
def test_names_of_a_foreign_pool_show_whole_on_its_pages(foreign):
    """Arms and workloads with a colon, in tables and charts; no arm or workload of another pool beside them."""
    page = unescape((foreign / "html/notebooks/02_sweep.html").read_text("utf-8"))
    assert all(name in page for name in ("sql:read", "support", "suffix:tree", "medusa_head", "draft_70m"))
    ours = [name for name in ("gsm8k", "cascade", "dflash") if re.search(rf"\b{name}\b", without_code(page))]
    assert ours == []


# ---- the comparison with the original study


@pytest.fixture(scope="session")
def reported() -> pd.DataFrame:
    return pd.read_csv(ROOT / "data/reported/original_study.csv", index_col="name")


def test_the_reported_figures_agree_with_their_own_definitions(reported):
    """token gain = capture x gap; headroom = oracle / best fixed - 1; best-of-N from the gap."""
    theirs = pd.to_numeric(reported["value"], errors="coerce")
    assert theirs["capture"] * theirs["oracle_gap"] == pytest.approx(theirs["token_gain"], abs=1e-3)
    headroom = theirs["workload_oracle_efficiency"] / theirs["best_fixed_efficiency"] - 1
    assert headroom == pytest.approx(theirs["workload_headroom"], abs=5e-4)
    for rho in ("0.02", "0.05", "0.1", "0.15", "0.2"):
        assert best_of_n(theirs["oracle_gap"], float(rho)) == pytest.approx(theirs[f"best_of_n:{rho}"], abs=1e-3)
        margin = theirs[f"best_selector:{rho}"] / theirs[f"best_of_n:{rho}"] - 1
        assert margin == pytest.approx(theirs[f"margin:{rho}"], abs=1e-3)


def test_ours_has_a_counterpart_for_every_reported_figure(tmp_path, reported):
    """Same names, so the comparison cannot miss one by a spelling; the prediction is the replay notebook's."""
    ours = {claim.name for claim in headline(read_log(simulated(tmp_path / "run")), resampling=Resampling(100))}
    assert set(reported.index) - ours == {"predicted_gain"}


# ---- the committed run


@pytest.mark.slow
def test_the_readme_states_the_figures_of_the_built_book(measured):
    """`make refresh` writes them; a hand edit, or a log that changed, shows here."""
    ledger = json.loads((measured / "html/claims.json").read_text("utf-8"))
    _, between, _ = readme_parts((ROOT / "README.md").read_text("utf-8"))
    assert between == headline_table(ledger, (ROOT / "book/intro.md").read_text("utf-8"))
    assert "[MEASURED]" in between


@pytest.mark.slow
def test_the_headline_is_rederived_from_the_log(measured):
    """The book's figures equal those of the public function on the committed log, to the digits that claims keep."""
    ours = {(c.quantity, *c.keys): c.to_dict() for c in headline(read_log(RUN), resampling=Resampling())}
    shown = {
        (c.quantity, *c.keys): c.to_dict()
        for found in read_claims(measured / "values").values()
        for c in found.values()
    }
    both = ours.keys() & shown.keys()
    for key in both:
        for part in ("value", "low", "high", "n", "unit"):
            assert ours[key][part] == shown[key][part], (key, part)
    assert {("oracle_gap",), ("capture",), ("workload_headroom",), ("oracle_dp_headroom",)} <= both


# ---- a reader's browser


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Silence."""


@contextlib.contextmanager
def served(book: Path):
    """A built book on a loopback address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(book)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def site(measured):
    with served(measured / "html") as address:
        yield address


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in .venv-all only")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(BROWSER_OPTIONS))
        yield browser
        browser.close()


def open_pages(chromium, site, book, **options):
    """Every page in turn, with a list of whatever went wrong on it: requests elsewhere, errors, console complaints."""
    context = chromium.new_context(**options)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("response", lambda response: wrong.append(response.url) if response.status >= 400 else None)

    def only_ours(route):
        if route.request.url.startswith((site, "data:")):
            return route.continue_()
        wrong.append(f"asked for {route.request.url}")
        return route.abort()

    page.route("**/*", only_ours)
    for name in pages(book):
        wrong.clear()
        page.goto(site + name, wait_until="networkidle")
        page.wait_for_function(
            "() => [...document.querySelectorAll('.vl-chart')].every(e => e.dataset.ready || e.dataset.error)"
        )
        wrong += page.evaluate(
            "() => [...document.querySelectorAll('.vl-chart')].map(e => e.dataset.error).filter(Boolean)"
        )
        yield name, page, list(wrong)
    context.close()


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_reader_can_open_every_page_and_see_numbers_with_intervals(chromium, book, width, scheme):
    """No error, no request elsewhere, every chart drawn, nothing wider than the screen, on a desk and on a phone,
    light and dark.
    """
    seen, how = [], {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with served(book) as address:
        for name, page, wrong in open_pages(chromium, address, book, **how):
            assert wrong == [], name
            assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth"), name
            seen += page.locator(".claim").all_inner_texts()
    assert sum(bool(re.search(r"\[-?[\d.,]+, -?[\d.,]+\]", text)) for text in seen) >= 20


@pytest.mark.browser
@pytest.mark.slow
def test_moving_a_slider_moves_the_chart_and_a_theme_change_keeps_it(chromium, site):
    page = chromium.new_page()
    page.goto(f"{site}notebooks/06_breakeven.html", wait_until="networkidle")
    page.wait_for_function("() => [...document.querySelectorAll('.vl-chart')].every(e => e.dataset.ready)")
    slider = page.locator(".vl-chart input[type=range]").first
    text = slider.locator("xpath=ancestor::figure").locator("svg.marks").inner_html
    before = text()
    slider.evaluate("e => { e.value = 0.3; e.dispatchEvent(new Event('input')); }")
    page.wait_for_timeout(300)
    assert text() != before
    page.evaluate("() => { document.documentElement.dataset.theme = 'dark'; }")
    page.wait_for_timeout(1500)
    assert page.locator(".vl-chart input[type=range]").first.input_value() == "0.3"
    page.close()


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_computes_the_speed_that_the_package_computes(chromium, site, measured):
    """The formula is typed twice, in Python and in the chart; at several prices the chart's best-of-N equals the
    package's.
    """
    from specsel.costs import best_of_n

    gap = json.loads((measured / "html/claims.json").read_text("utf-8"))["05_intervals.oracle_gap"]["value"]
    page = chromium.new_page()
    page.goto(f"{site}notebooks/06_breakeven.html", wait_until="networkidle")
    page.wait_for_function("() => [...document.querySelectorAll('.vl-chart')].every(e => e.dataset.ready)")
    for rho in (0.04, 0.2, 0.4):  # steps of the slider
        page.locator(".vl-chart input[type=range]").first.evaluate(
            f"e => {{ e.value = {rho}; e.dispatchEvent(new Event('input')); }}"
        )
        page.wait_for_timeout(300)
        drawn = page.locator(".vl-chart").first.locator("svg.marks text").all_text_contents()
        assert f"{best_of_n(gap, rho):.3f}" in drawn
    page.close()


@pytest.mark.browser
@pytest.mark.slow
def test_a_reader_without_scripts_sees_the_pictures(chromium, site):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}notebooks/02_sweep.html")
    image = page.locator(".vl-chart img").first
    assert image.bounding_box()["width"] > 200 and len(image.get_attribute("alt")) > 40
    context.close()
