"""The command line: parse, call one public function, print.

Exit status 0 = success, 1 = a check failed, 2 = bad input (one sentence on stderr). With --json a command prints one
object on stdout and nothing else there. Nothing is computed here that a notebook could not call.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsel.cli_engine import add_engine_commands
from specsel.logs import LogWarning, SpecselError

if TYPE_CHECKING:
    from specsel.logs import PositionLog

OPTIONS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


def _app(words: str, example: str) -> typer.Typer:
    return typer.Typer(help=f"{words}\n\nExample: specsel {example}", **OPTIONS)


MOST_FAULTS = 10_000  # printed as JSON
app = _app(
    "Which drafter should speculate on the next block? Logs, replay, selectors, the book.",
    "headline data/runs/campaign",
)
log_app = _app("Check, summarise, convert, import logs.", "log validate data/runs/campaign")
selector_app = _app(
    "Fit a redraft selector that the engine and replay can use.",
    "selector fit data/runs/campaign -o selector.json",
)
app.add_typer(log_app, name="log")
app.add_typer(selector_app, name="selector")
add_engine_commands(app)


def _option(words: str, *flags: str, **rules: Any) -> Any:
    return typer.Option(*flags, help=words, **rules)


Run = Annotated[Path, typer.Argument(help="run folder, or a .jsonl or .jsonl.gz file")]
Paths = Annotated[list[Path], typer.Argument(help="run folders or log files")]
Json = Annotated[bool, _option("print one JSON object and nothing else", "--json")]
Seed = Annotated[int, _option("seed of everything random")]
Output = Annotated[Path, _option("file or folder to write", "--out", "-o")]
Arms = Annotated[str | None, _option("only these arms of the log, separated by commas (eagle,ngram)")]
Dominant = Annotated[str | None, _option("arm that drafts first (default: the one that needs the fewest blocks)")]
Threshold = Annotated[float | None, _option("redraft from this probability (default: chosen by the inner loop)")]
PolicyName = Annotated[str | None, _option("fixed:ARM, best_fixed_request, oracle_block, oracle_dp, random, ucb1, ...")]
SelectorFile = Annotated[Path | None, _option("selector.json: replay this redraft selector instead of a policy")]
NoLoops = Annotated[bool, _option("leave out requests whose output repeats itself", "--without-loops")]
Params = Annotated[list[str] | None, _option("name=value of a notebook parameter", "--param", "-p")]
ParamFile = Annotated[Path | None, _option("YAML or JSON file of notebook parameters", "--parameters", "-f")]
Pages = Annotated[Path | None, _option("folder for the pages (default: _build/html)", "--out", "-o")]
FeedbackMode = StrEnum("FeedbackMode", "bandit full delayed")
Reset = StrEnum("Reset", "request never")


def main() -> None:
    """Entry point of `specsel`."""
    warnings.showwarning = lambda message, category, *_: print(f"warning: {message}", file=sys.stderr)
    warnings.filterwarnings("always", category=LogWarning)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except SpecselError as error:
        _stop(error, 2)
    except ModuleNotFoundError as error:
        _stop(f"'{error.name}' is not installed; the book needs the extra 'book': pip install 'specsel[book]'", 2)
    except OSError as error:
        _stop(f"{error.filename or 'file'}: {error.strerror or error}", 2)


def _stop(message: object, status: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def show(result: dict[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """The object as JSON, or the lines as text."""
    print(json.dumps(result, allow_nan=False) if as_json else "\n".join(lines))


def _table(rows: list[list[str]]) -> list[str]:
    """Rows as aligned columns, the first to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([r[0].ljust(first), *map(str.rjust, r[1:], others)]).rstrip() for r in rows]


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def _read(run: Path, arms: str | None) -> PositionLog:
    """A log, restricted to the arms that were named."""
    from specsel.logs import read_log

    log = read_log(run)
    return log if arms is None else log.pool([arm.strip() for arm in arms.split(",")])


# ---- logs


@log_app.command("validate")
def log_validate(path: Paths, as_json: Json = False) -> None:
    """Name every fault of a log, with file, line and field; exit status 1 when there is one.

    Example: specsel log validate data/runs/campaign
    """
    from specsel.logs import grouped, validate

    missing = [p for p in path if not p.exists()]
    if missing:
        raise SpecselError(f"{missing[0]}: does not exist; name a run folder or a log file")
    faults = [fault for p in path for fault in validate(p)]
    found = [{"file": f.file, "line": f.line, "field": f.field, "message": f.message} for f in faults[:MOST_FAULTS]]
    lines = list(grouped(faults))
    more = [f"... and {len(lines) - 100} kinds of fault more"] if len(lines) > 100 else []
    total = [f"{len(faults):,} faults"] if len(faults) > len(lines) or more else []
    told = {"ok": not faults, "faults": found} | ({"n_faults": len(faults)} if len(found) < len(faults) else {})
    show(told, [*lines[:100], *more, *total] or ["no faults"], as_json)
    if faults:
        raise typer.Exit(1)


@log_app.command("summary")
def log_summary(run: Run, arms: Arms = None, as_json: Json = False) -> None:
    """Requests, positions, and per workload and arm the mean accepted tokens and the block efficiency.

    Example: specsel log summary data/runs/campaign
    """
    from specsel.logs import summary

    found = summary(_read(run, arms))
    rows = [["workload", "arm", "requests", "positions", "mean accepted", "block efficiency"]]
    for w in found["requests"]:
        for arm in found["arms"]:
            counts = [str(found[what][w]) for what in ("requests", "positions")]
            rows.append([w, arm, *counts, *(_number(found[m][w][arm]) for m in ("mean_accepted", "block_efficiency"))])
    show(found, [f"{found['run']} [{found['label']}], draft length {found['draft_len']}", *_table(rows)], as_json)


@log_app.command("convert")
def log_convert(source: Paths, out: Output) -> None:
    """Copy logs into another form: a .jsonl or .jsonl.gz file, or a run folder.

    Example: specsel log convert data/runs/campaign -o campaign.jsonl
    """
    from specsel.logs import convert

    print(convert(source[0] if len(source) == 1 else source, out))


@log_app.command("import")
def log_import(
    source: Annotated[Path, typer.Argument(help="folder of simulator files, or one of them")], out: Output
) -> None:
    """Turn somebody else's position log (SpecDecode-Bench simulator files) into a run folder.

    Example: specsel log import simulator/data -o runs/specdecode_bench
    """
    from specsel.logs.importers import import_specdecode_bench

    print(import_specdecode_bench(source, out))


# ---- replay, selector, headline


@app.command("replay")
def replay_command(
    run: Run,
    policy: PolicyName = None,
    selector: SelectorFile = None,
    arms: Arms = None,
    feedback: Annotated[FeedbackMode | None, _option("what the policy sees (default: its need)")] = None,
    reset: Annotated[Reset, _option("when the policy forgets")] = Reset.request,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Replay a policy exactly: how many blocks would it have needed?

    Example: specsel replay data/runs/campaign --policy hedgespec --feedback delayed
    """
    from specsel.costs import load_costs
    from specsel.policies.catalogue import policy_by_name
    from specsel.replay import follow, replay
    from specsel.selection.route import selector_plan

    if (policy is None) == (selector is None):
        raise SpecselError("give either --policy NAME or --selector FILE")
    log = _read(run, arms)
    if selector is not None:
        found = follow(log, selector_plan(log, selector))
    else:
        options = {"feedback": feedback and str(feedback), "reset": str(reset), "seed": seed}
        found = replay(log, policy_by_name(policy, log, costs=load_costs(run)), name=policy, **options)
    by_workload = found.by_workload()
    rows = [["workload", "requests", "blocks", "emitted", "block efficiency", *log.arms]]
    for name, r in by_workload.items():
        counts = [str(r[what]) for what in ("requests", "blocks", "emitted")]
        rows.append([name, *counts, _number(r["block_efficiency"]), *map(str, r["pulls"].values())])
    told = {"policy": found.policy, "feedback": found.feedback, "by_workload": by_workload}
    first = f"{found.policy}, feedback {found.feedback}: block efficiency {found.block_efficiency:.3f}"
    show(told, [first, *_table(rows)], as_json)


@selector_app.command("fit")
def selector_fit(run: Run, out: Output, dominant: Dominant = None, arms: Arms = None, as_json: Json = False) -> None:
    """Fit the redraft selector on all workloads of a log and write it as readable JSON.

    Example: specsel selector fit data/runs/campaign -o selector.json
    """
    from specsel.selection.blocks import blocks
    from specsel.selection.selector import fit_selector

    log = _read(run, arms)
    source = {"run": log.run, "label": log.label, "log_sha256": log.sha256}
    made = fit_selector(blocks(log, dominant), trained_on=source)
    made.save(out)
    count, requests = made.trained_on["blocks"], made.trained_on["requests"]
    result = {"selector": str(out), "dominant": made.dominant, "threshold": made.threshold}
    trained = f"trained on {count:,} blocks of {requests:,} requests"
    text = f"{out}: {made.dominant} drafts first, redraft from probability {made.threshold:.2f}, {trained}"
    show(result | {"features": list(made.features), "blocks": count}, [text], as_json)


@app.command("headline")
def headline_command(
    run: Run,
    arms: Arms = None,
    dominant: Dominant = None,
    threshold: Threshold = None,
    without_loops: NoLoops = False,
    resamples: Annotated[int, _option("resamples of each interval", min=1)] = 10_000,
    level: Annotated[float, _option("coverage of the intervals, between 0 and 1")] = 0.95,
    seed: Seed = 7,
    as_json: Json = False,
) -> None:
    """Every headline figure of the study on this log, with label, interval, number of requests and method.

    Example: specsel headline data/runs/campaign --json
    """
    from specsel.costs import load_costs
    from specsel.paper.claims import render
    from specsel.stats import Resampling
    from specsel.study.headline import headline, to_json

    if not 0 < level < 1:
        raise SpecselError(f"--level is {level}; expected a number between 0 and 1")
    log = _read(run, arms)
    if without_loops:
        if log.looping is None:
            raise SpecselError(
                f"{log.run}: does not say which requests loop (no requests.jsonl.gz); leave --without-loops out"
            )
        log = log.select(~log.looping)
    resampling = Resampling(resamples, level, seed)
    claims = headline(log, resampling=resampling, dominant=dominant, threshold=threshold, costs=load_costs(run))
    show(to_json(claims), [f"{c.name:36s} {render(c, counts=True)}" for c in claims], as_json)


@app.command("breakeven")
def breakeven_command(
    gap: Annotated[float, _option("oracle gap G, for instance 0.133")],
    capture: Annotated[float, _option("capture c, 0..1")],
    rate: Annotated[float, _option("redraft rate r, 0..1")],
    rho: Annotated[list[float], _option("cost of a draft in verifications; several may follow")],
    more: Annotated[list[float] | None, typer.Argument(hidden=True)] = None,
    alpha: Annotated[float, _option("extra verification cost of a redraft")] = 0.0,
    as_json: Json = False,
) -> None:
    """When token gains become time: the published break-even formula.

    Example: specsel breakeven --gap 0.133 --capture 0.61 --rate 0.43 --rho 0.02 0.1 0.2
    """
    from specsel.costs import best_of_n, break_even_rho, max_alpha, relative_speed

    rows = [
        {"rho": r, "best_of_n": best_of_n(gap, r, alpha), "selector": relative_speed(gap, capture, rate, r, alpha)}
        for r in (*rho, *(more or ()))
    ]
    limit, largest = break_even_rho(gap, capture, rate, alpha), max_alpha(gap, capture, rate)
    told = "never redrafts" if math.isnan(limit) else "always pays" if math.isinf(limit) else _number(limit)
    finite = {k: v if math.isfinite(v) else None for k, v in {"break_even_rho": limit, "max_alpha": largest}.items()}
    text = [[f"{row['rho']:g}", _number(row["best_of_n"]), _number(row["selector"])] for row in rows]
    last = f"break-even rho: {told}; largest alpha: {_number(finite['max_alpha'])}"
    show({"rows": rows, **finite}, [*_table([["rho", "best-of-N", "selector"], *text]), last], as_json)


# ---- the book, the machine


@app.command("book")
def book_command(
    run: Annotated[Path | None, _option("run folder for all notebooks instead of their default")] = None,
    param: Params = None,
    parameters: ParamFile = None,
    out: Pages = None,
    pdf: Annotated[bool, _option("print the book as one PDF (needs Chromium)", "--pdf")] = False,
) -> None:
    """Run the notebooks and build the book; nothing of it needs torch.

    Example: specsel book --run data/runs/campaign
    """
    from specsel.paper.build import BuildFailed, build_book

    try:
        print(build_book(run, parameters=_parameters(param or [], parameters), output=out, pdf=pdf))
    except BuildFailed as error:
        _stop(error, 1)


def _parameters(pairs: list[str], path: Path | None) -> dict[str, Any]:
    """Notebook parameters from a file and from name=value pairs, values read as YAML; pairs win."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8")) or {} if path else {}
        wrong = [pair for pair in pairs if "=" not in pair]
        if wrong or not isinstance(found, dict):
            source = wrong[0] if wrong else path
            raise SpecselError(f"{source}: is no notebook parameter; write name=value, or a YAML file of such pairs")
        return found | {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise SpecselError(f"notebook parameters are no YAML ({reason}); write name=value") from None


@app.command("doctor")
def doctor_command(as_json: Json = False) -> None:
    """Versions, environment, whether the engine is installed, caches and free disk space: what a bug report needs.

    Example: specsel doctor
    """
    from specsel.doctor import examine

    found = examine()
    show(found, _table([[key, str(value)] for key, value in found.items()]), as_json)


if __name__ == "__main__":
    main()
