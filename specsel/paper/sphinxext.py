"""Build-time code of the book: the {claim} role and its ledger, charts from stored specifications, assets without a
network.

Nothing here is needed by a notebook. The extension works in Jupyter Book 1 and in plain Sphinx.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import vl_convert
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.fileutil import copy_asset

from specsel.paper.charts import MIME, fixed_width
from specsel.paper.claims import cite, read_claims
from specsel.paper.show import grid, mark

VEGA_LITE = "6.4"
DATA_CLAIM = re.compile(r'data-claim="([^"]*)"')
SHOWN_ROWS = 40  # of a chart's data, in the table below it
log = logging.getLogger(__name__)


# ---- numbers in prose


class ClaimRole(SphinxRole):
    """{claim}`notebook.name`: value, interval and label; `name:.2f` with another format, `name|value` the bare
    value.
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            found, text = cite(self.env.config.specsel_claims, self.text)
        except (KeyError, ValueError) as error:
            log.warning("no claim for {claim}`%s`: %s", self.text, error.args[0], location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        notebook = self.text.strip().partition(".")[0]
        return [nodes.raw("", mark(found, text, notebook), format="html")], []


class ClaimTable(SphinxDirective):
    """{claims} NOTEBOOK QUANTITY ...: the claims of these quantities as a table, a row for each group.

    A table without a claim fails the build, unless it is `:optional:`, for what not every log records.
    """

    required_arguments, optional_arguments = 2, 99
    option_spec = {n: directives.unchanged for n in ("corner", "rows", "columns")} | {"optional": directives.flag}

    def run(self) -> list[nodes.Node]:
        notebook, *quantities = self.arguments
        claims = self.env.config.specsel_claims.get(notebook, {}).values()
        found = [claim for quantity in quantities for claim in claims if claim.quantity == quantity]
        if not found:
            if "optional" not in self.options:
                log.warning("no claim of %s is a %s", notebook, " or ".join(quantities), location=self.get_location())
            return []
        how = {name: value for name, value in self.options.items() if name != "optional"}
        table = grid(found, notebook=notebook, **how)
        return [nodes.raw("", f'<div class="claims-table">{table.html}</div>', format="html")]


def load_claims(app: Sphinx, config: Any) -> None:
    """Read the claims files and point MathJax to the local file."""
    config.specsel_claims = read_claims(Path(app.srcdir) / config.specsel_values_dir)
    config.mathjax_path = "tex-svg.js"


def write_ledger(app: Sphinx, error: Exception | None) -> None:
    """claims.json beside the pages: every claim of the book with its origin and the pages that show it, by a role, by a
    directive, or in the outputs of their cells.
    """
    if error or app.builder.format != "html":
        return
    out, entries = Path(app.outdir), {}
    pages = {path: {*map(html.unescape, DATA_CLAIM.findall(path.read_text("utf-8")))} for path in out.rglob("*.html")}
    for notebook, claims in app.config.specsel_claims.items():
        for name, found in claims.items():
            key = f"{notebook}.{name}"
            shown = [path.relative_to(out).with_suffix("").as_posix() for path, keys in pages.items() if key in keys]
            entries[key] = found.to_dict() | {"cited_in": sorted(shown)}
    text = json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    (out / "claims.json").write_text(text + "\n", encoding="utf-8")


# ---- charts


class chart(nodes.raw):
    """A Vega-Lite chart, which pages that are not HTML leave out; `spec` holds the specification as JSON text."""


class VegaMime:
    """The myst-nb plug-in (entry point) that turns a stored specification into a chart node; widget views are left
    out.
    """

    mime_priority_overrides = [("*", MIME, 1), ("*", "application/vnd.jupyter.widget-view+json", None)]

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """A chart node for our MIME type, None for everything else."""
        if inline or data.mime_type != MIME:
            return None
        spec = json.dumps(data.content, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return [chart(format="html", spec=spec)]


def visit_chart(self: Any, node: chart) -> None:
    """A picture that works without scripts, the specification that replaces it by a live chart, and the values as a
    table.
    """
    spec = json.loads(node["spec"])
    description = html.escape(str(spec.get("description") or spec.get("title") or "chart"), quote=True)
    name = f"chart-{hashlib.sha256(node['spec'].encode()).hexdigest()[:16]}.svg"
    folder = Path(self.builder.outdir) / self.builder.imagedir
    folder.mkdir(parents=True, exist_ok=True)
    picture = vl_convert.vegalite_to_svg(fixed_width(spec) | {"background": "white"}, vl_version=VEGA_LITE)
    (folder / name).write_text(picture, encoding="utf-8")
    inside_script = node["spec"].replace("</", "<\\/")
    self.body += [
        f'<figure class="vl-chart" aria-label="{description}"><div class="vl-view">',
        f'<img src="{self.builder.imgpath}/{name}" alt="{description}"/></div>',
        f'<script type="application/json">{inside_script}</script>',
        *data_tables(spec),
        "</figure>\n",
    ]
    raise nodes.SkipNode


def data_tables(spec: dict[str, Any]) -> Iterator[str]:
    """HTML tables of the data sets behind a chart, folded, at most SHOWN_ROWS rows each; reference lines are left
    out.
    """
    tables = [rows for rows in spec.get("datasets", {}).values() if len(rows) > 2 or any(len(row) > 2 for row in rows)]
    for number, rows in enumerate(tables, start=1):
        part = f", part {number} of {len(tables)}" if len(tables) > 1 else ""
        more = f" (first {SHOWN_ROWS} of {len(rows)} rows)" if len(rows) > SHOWN_ROWS else ""
        frame = pd.DataFrame(rows[:SHOWN_ROWS]).rename(columns=lambda name: name.replace("_", " "))
        table = frame.to_html(index=False, border=0, na_rep="–", float_format="{:.4g}".format)
        yield f'<details class="vl-data"><summary>Values behind this chart{part}{more}</summary>{table}</details>'


# ---- assets


def write_static(app: Sphinx) -> None:
    """Vega, MathJax, our script and style sheet, straight into the output: pages ask no other server for anything."""
    if app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static"
    copy_asset(str(Path(__file__).parent / "assets"), str(folder))
    copy_asset(str(resources.files("sphinx-mathjax-offline") / "static/mathjax/tex-svg.js"), str(folder))
    vega = vl_convert.javascript_bundle(vl_version=VEGA_LITE)
    (folder / "vega-bundle.js").write_text(f"(()=>{{{vega}}})();", encoding="utf-8")


def page_assets(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Drop scripts that need a network (thebe), add the chart scripts to pages with charts; no icon is asked for."""
    context["metatags"] = context.get("metatags", "") + '<link rel="icon" href="data:,"/>'
    files = context.get("script_files", [])
    files[:] = [f for f in files if "thebe" not in f"{getattr(f, 'filename', f)}{getattr(f, 'attributes', '')}".lower()]
    if doctree is not None and any(doctree.findall(chart)):
        app.add_js_file("vega-bundle.js", loading_method="defer", priority=900)
        app.add_js_file("charts.js", loading_method="defer", priority=901)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role, the nodes and the handlers."""
    app.add_config_value("specsel_values_dir", "../values", "env")
    app.add_config_value("specsel_claims", {}, "")
    app.add_role("claim", ClaimRole())
    app.add_directive("claims", ClaimTable)
    app.add_node(chart, html=(visit_chart, None))
    app.connect("config-inited", load_claims)
    app.connect("builder-inited", write_static)
    app.connect("html-page-context", page_assets)
    app.connect("build-finished", write_ledger)
    app.add_css_file("book.css")
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
