"""Build-time code on a book of one page: the role, the table, a chart, the ledger."""

import html
import json
import re

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

from specsel.paper import sphinxext
from specsel.paper.claims import dump_claims, make_claim
from specsel.stats import Estimate

GAP = make_claim(
    "gap",
    Estimate(0.133, 0.123, 0.142, 0.95, 64, "BCa", 100, 0),
    label="MEASURED",
    unit="fraction",
    headline=True,
    function="oracle_gap",
    origin={"run": "demo", "log_sha256": "ab" * 32},
)
SKILL = make_claim(
    ("skill", "code"),
    Estimate(2.06, 1.54, 2.62, 0.95, 64, "BCa", 100, 0),
    label="MEASURED",
    unit="ratio",
    function="skill",
)
CHAT = make_claim(
    ("skill", "a:b <i>"),
    Estimate(2.5, 2.1, 2.9, 0.95, 64, "BCa", 100, 0),
    label="MEASURED",
    unit="ratio",
    function="skill",
)
VERDICT = make_claim(("verdict", "code"), "beats random", label="MEASURED", function="verdict")


def build(folder, text):
    """Page HTML, warnings, and claims.json of a book whose only page is `text`."""
    (folder / "src").mkdir()
    (folder / "values").mkdir()
    (folder / "values/04_selector.json").write_bytes(dump_claims([GAP, SKILL, CHAT, VERDICT]))
    (folder / "src/index.md").write_text(text, encoding="utf-8")
    warnings = []
    with docutils_namespace():
        settings = {
            "extensions": ["myst_parser", "specsel.paper.sphinxext"],
            "html_theme": "basic",
            "specsel_values_dir": "../values",
        }
        app = Sphinx(
            folder / "src",
            None,
            folder / "out",
            folder / "trees",
            "html",
            settings,
            status=None,
            warning=type(
                "Stream",
                (),
                {
                    "write": lambda self, line: warnings.append(line),
                    "isatty": lambda self: False,
                    "flush": lambda self: None,
                },
            )(),
        )
        app.build()
    return (
        (folder / "out/index.html").read_text("utf-8"),
        "".join(warnings),
        json.loads((folder / "out/claims.json").read_text("utf-8")),
    )


def words(page):
    """What a reader sees, in a line; the cells of a table apart."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"</t[hd]>", " ", page))).split())


@pytest.mark.slow
def test_a_claim_in_prose_shows_value_interval_label_and_origin(tmp_path):
    page, warnings, ledger = build(
        tmp_path, "# Title\n\nThe gap is {claim}`04_selector.gap`, bare {claim}`04_selector.gap|value`.\n"
    )
    assert "The gap is 13.3 % [12.3, 14.2] [MEASURED], bare 13.3 %." in words(page)
    assert (
        'title="MEASURED; 95 % interval, BCa; 100 resamples, seed 0; n = 64 requests; run demo; '
        'log abababababab; computed by oracle_gap"' in page
    )
    assert warnings == "" and ledger["04_selector.gap"]["cited_in"] == ["index"]


@pytest.mark.slow
def test_an_unknown_claim_is_a_warning_with_its_line(tmp_path):
    """Under -W the build fails; the text stays visible."""
    page, warnings, _ = build(tmp_path, "# Title\n\nThe gap is {claim}`04_selector.gaap`.\n")
    assert "index.md:3: WARNING: no claim for {claim}`04_selector.gaap`" in warnings
    assert "04_selector.gaap" in words(page)


@pytest.mark.slow
def test_claims_stand_in_tables(tmp_path):
    """A row for each group, whatever its name: a workload may be called "a:b"."""
    table = "```{claims} 04_selector skill verdict\n:corner: held out\n```\n"
    page, warnings, ledger = build(tmp_path, f"# Title\n\n{table}")
    rows = "code 2.060 [1.540, 2.620] beats random a:b <i> 2.500 [2.100, 2.900]"
    assert warnings == "" and f"held out [MEASURED] skill verdict {rows}" in words(page)
    assert ledger["04_selector.skill:a:b <i>"]["cited_in"] == ["index"]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "warned"), [("", True), (":optional:\n", False)])
def test_a_table_without_claims_fails_the_build_unless_it_is_optional(tmp_path, option, warned):
    _, warnings, _ = build(tmp_path, f"# Title\n\n```{{claims}} 04_selector nothing\n{option}```\n")
    assert ("no claim of 04_selector is a nothing" in warnings) == warned


def test_the_values_of_a_chart_stand_in_a_table_without_its_reference_lines():
    """Missing keys are dashes; numbers have sensible digits; markup in data is text."""
    data = {
        "line": [{"at": 1.0}],
        "rows": [{"arm": "<a>", "x": 0.123456, "low": 0.1}, {"arm": "b", "x": 2, "high": 3.0}],
    }
    tables = list(sphinxext.data_tables({"datasets": data}))
    assert len(tables) == 1
    assert re.findall("<td>(.*?)</td>", tables[0])[:4] == ["&lt;a&gt;", "0.1235", "0.1", "–"]


def test_scripts_that_need_a_network_are_dropped():
    class File:
        def __init__(self, filename, **attributes):
            self.filename, self.attributes = filename, attributes

    context = {
        "script_files": [
            File("_static/doctools.js"),
            File("_static/sphinx-thebe.js"),
            File(None, body="THEBE_JS_URL = 1"),
        ]
    }
    sphinxext.page_assets(None, "index", "page.html", context, None)
    assert [file.filename for file in context["script_files"]] == ["_static/doctools.js"]
