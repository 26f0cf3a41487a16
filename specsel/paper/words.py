"""Sentences that the numbers decide: rankings, answers of the policy table, prices, and the comparison with the
original study.

Another log changes the numbers and with them the sentences; no sentence of the book that judges is typed. Nothing is
computed here but words.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from specsel.costs import Costs
from specsel.paper.claims import Claim, make_claim, render
from specsel.paper.tables import Claims, pick
from specsel.stats import Estimate

SOURCE = "the original study, measured there"
MATERIAL = 0.02  # a gain whose upper limit is below this is called too small to matter
SIGNIFICANT = 0.05
TOLERANCE = 0.02  # of a coverage: 93 to 97 % is as good as 95 %
ROUNDING = 1e-9  # differences below this are rounding, not gains
TIE = 0.01  # logits; a difference between engine and replay at a smaller margin is a tie of rounding

Row = tuple[Claim, Claim | None, str]  # reported, ours, verdict


def listed(words: Iterable[object]) -> str:
    """Words as an English list.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    words = [str(word) for word in words]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])) or "none"


def grouped(verdicts: Mapping[str, str]) -> dict[str, list[str]]:
    """Verdict -> keys that have it, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for key, words in verdicts.items():
        groups.setdefault(words, []).append(key)
    return groups


def sentence(parts: Iterable[str]) -> str:
    """Parts as one sentence, or "" where there are none.

    >>> sentence(["one thing", "another"])
    'One thing; another.'
    """
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def keyed(claims: Claims, pattern: str) -> dict[str, object]:
    """Last key -> value of the claims of a pattern."""
    return {claim.name.split(":")[-1]: claim.value for claim in pick(claims, pattern)}


def _one(claims: Claims, name: str) -> Claim | None:
    return next(iter(pick(claims, name)), None)


# ---- fixed arms


def ranking(claims: Claims) -> str:
    """Does the best arm depend on the workload? From the claims best_arm:WORKLOAD.

    >>> from specsel.paper.claims import make_claim
    >>> ranking([make_claim(f"best_arm:{w}", a, label="SIM") for w, a in (("code", "a"), ("chat", "b"))])
    'The best arm depends on the workload: a on code; b on chat.'
    """
    groups = grouped(keyed(claims, "best_arm:*"))
    if len(groups) == 1:
        return f"One arm, {next(iter(groups))}, is the best on every workload."
    return (
        "The best arm depends on the workload: "
        + "; ".join(f"{arm} on {listed(where)}" for arm, where in groups.items())
        + "."
    )


def gain(claims: Claims, name: str) -> str:
    """How a relative gain reads: a gain that matters, too small to matter, not distinguishable from none, undefined.

    >>> from specsel.paper.claims import Label
    >>> gain([Claim("h", 0.006, "fraction", Label.MEASURED, 0.001, 0.011)], "h")
    'too small to matter'
    """
    claim = _one(claims, name)
    if claim is None or claim.value is None:
        return "undefined on this log"
    if claim.low is None or claim.high is None:
        return "a number without an interval, so nothing can be concluded"
    if claim.high < MATERIAL:
        return "too small to matter"
    if claim.low <= 0:
        return "not distinguishable from none"
    return "a gain that matters" if claim.low >= MATERIAL else "a gain, though perhaps too small to matter"


def subset_ranking(claims: Claims, prefix: str = "subset") -> str:
    """Is the best arm the same on every subset, or in every run? From the claims PREFIX:NAME:ARM."""
    best: dict[str, tuple[float, str]] = {}
    for claim in pick(claims, f"{prefix}:*:*"):
        _, subset, arm = claim.name.split(":")
        best[subset] = max(best.get(subset, (0.0, "")), (claim.value or 0.0, arm), key=lambda entry: entry[0])
    groups = grouped({subset: arm for subset, (_, arm) in best.items()})
    if len(groups) == 1:
        return f"{next(iter(groups))} is the best arm on every {prefix}."
    return "The best arm changes: " + "; ".join(f"{arm} on {listed(where)}" for arm, where in groups.items()) + "."


def engine(check: pd.DataFrame) -> str:
    """One sentence on the live engine against replay; the table of `overview.engine_check`."""
    if not len(check):
        return "This run has no check against the live engine."
    requests, equal, worst = (
        int(check["requests"].sum()),
        int(check["equal"].sum()),
        check["largest_margin"].dropna().max(),
    )
    text = f"{equal:,} of {requests:,} requests, over {listed(check['arm'])}, have the same blocks live and in replay"
    if equal == requests:
        return text + "."
    explained = worst < TIE
    return text + (
        "; every difference is a tie of the target's two best tokens."
        if explained
        else f"; a difference at a margin of {worst:.2g} is not explained."
    )


def low_precision(check: pd.DataFrame) -> str:
    """Two sentences on the live engine in a lower precision: against replay, and against plain decoding. The table of
    `overview.checks_beside`."""
    words = []
    for precision, rows in check.groupby("precision", sort=False):
        requests, equal = int(rows["requests"].sum()), int(rows["equal"].sum())
        words.append(f"In {precision}, {equal:,} of {requests:,} requests have the same blocks live and in replay.")
        if rows["same_output"].notna().all():
            same, margin = int(rows["same_output"].sum()), rows["output_margin"].max()
            apart = f", where the target's two best tokens are at most {margin:.2g} apart"
            others = f"; the others leave it at output token {_middle(rows['output_parts'])}{apart}"
            words.append(
                f"The answer is that of plain decoding in {same:,} of them{others if same < requests else ''}."
            )
    return " ".join(words) or "No run in a lower precision was checked beside this one."


def _middle(values: pd.Series) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}, in the median per arm"


# ---- policies


def learners(table: pd.DataFrame) -> dict[str, str]:
    """Does any learner beat the best fixed arm, by what it reads, and how much of the exact headroom is left?

    From the table of `tuning.compare`. Rows with immediate counts of every arm, which no engine has, are left out;
    differences are paired and Holm-corrected over the whole table.
    """
    rows = table[(table["sees"] != "hindsight") & (table["feedback"] != "full")]
    least_p, plain = table.attrs.get("least_p", 0.0), rows["context"] == "no context"
    groups = {
        "without_context": (plain, "policies without context"),
        "published": (plain & rows["source"].str.contains("arXiv"), "published drafter selectors without context"),
        "with_context": (~plain, "policies with context"),
        "by_workload": (rows["context"] == "workload", "policies that know the workload only"),
        "by_request": (rows["context"] == "request", "policies that choose once per request"),
        "by_block": (rows["context"] == "block", "policies that read context at every block"),
    }
    return {name: _answer(rows[chosen], which, least_p) for name, (chosen, which) in groups.items()} | {
        "left": _left(rows, table)
    }


def _left(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    """How much of the exact headroom the best policy reaches, and what it leaves."""
    exact = table.loc[table["policy"] == "oracle_dp", "fixed"].max()
    if not len(rows) or not exact > ROUNDING:
        return "The exact oracle gains nothing over the best fixed arm, so there is nothing to choose."
    best = rows.loc[rows["block_efficiency"].idxmax()]
    if best["fixed"] <= 0:
        return f"No policy gains on the best fixed arm; all of the exact headroom is left (best: {best['policy']})."
    share = f"{100 * best['fixed'] / exact:.0f} % of what the exact oracle gains over the best fixed arm"
    return f"The best of all policies, {best['policy']}, reaches {share}; the rest is left."


def _answer(rows: pd.DataFrame, which: str, least_p: float) -> str:
    names = rows["policy"].nunique()
    if not names:
        return f"This log allows no {which}."
    if least_p >= SIGNIFICANT:
        return f"With so few resamples no difference among the {which} ({names}) can be told from chance."
    winners = rows[(rows["fixed_low"] > 0) & (rows["fixed_p"] < SIGNIFICANT)].sort_values("fixed", ascending=False)
    best = winners["policy"].unique()
    count = {0: "none beats", 1: "one beats"}.get(len(best), f"{len(best)} beat")
    most = {0: "", 1: f": {next(iter(best), '')}"}.get(len(best), f"; {next(iter(best), '')} gains most")
    return f"Of the {which} ({names}), {count} the best fixed arm beyond chance{most}."


def on_the_way(regret: pd.DataFrame) -> str:
    """Who is ahead of whom at the end of the curves? The table `Curves.regret`."""
    last = regret.groupby("series", sort=False).tail(1)
    told: dict[str, dict[str, list[str]]] = {}
    for name, low, high in zip(last["series"], last["low"], last["high"], strict=True):
        policy, other = name.split(" against ")
        word = "behind" if low > 0 else "ahead of" if high < 0 else "not told apart from"
        told.setdefault(policy, {}).setdefault(word, []).append(other)
    alike = grouped(
        {policy: listed(f"{word} {listed(others)}" for word, others in found.items()) for policy, found in told.items()}
    )
    parts = (f"{listed(names)} {'is' if len(names) == 1 else 'are'} {words}" for words, names in alike.items())
    return f"On the way, {'; '.join(parts)}."


def sensitivity(table: pd.DataFrame) -> str:
    """Which policies does their main parameter decide about? The table of `tuning.sensitivity`."""
    if not len(table):
        return "This log allows no policy with a parameter."
    spread = table.groupby("policy", sort=False)["value"].agg(lambda v: v.max() - v.min())
    better = table[table["low"] > 0].groupby("policy", sort=False).size()
    always = [name for name, n in better.items() if n == (table["policy"] == name).sum()]
    most, least = (
        f"{name}, where it moves {spread[name]:.2f} tokens per block" for name in (spread.idxmax(), spread.idxmin())
    )
    above = f"{len(better)} of {len(spread)} policies are above the best fixed arm at some setting"
    return sentence(
        [
            f"the main parameter matters most for {most}, and least for {least}",
            f"{above}, {len(always)} at every setting",
        ]
    )


def order(table: pd.DataFrame) -> str:
    """Does the order of the arms, which settles ties, change a policy? The table of `tuning.arm_order`."""
    moved = table[(table["low"] > ROUNDING) | (table["high"] < -ROUNDING)]
    if not len(moved):
        return "The order of the arms, which settles ties, changes no policy beyond chance."
    return f"The order of the arms, which settles ties, changes {listed(moved['policy'])} beyond chance."


# ---- selector, intervals, price


def selector_summary(claims: Claims) -> str:
    """One sentence over the held-out workloads, from the claims verdict:WORKLOAD.

    >>> from specsel.paper.claims import make_claim
    >>> found = {"code": "beats random", "copy": "worse than random"}
    >>> selector_summary([make_claim(f"verdict:{w}", v, label="SIM") for w, v in found.items()])
    'The selector beats random on code; it is worse than random on copy.'
    """
    words = {
        "beats random": "beats random",
        "no measurable benefit": "has no measurable benefit",
        "worse than random": "is worse than random",
    }
    found = {key: words.get(str(value), "could not be fitted") for key, value in keyed(claims, "verdict:*").items()}
    return "The selector " + "; it ".join(f"{what} on {listed(where)}" for what, where in grouped(found).items()) + "."


def coverage(study: pd.DataFrame, level: float = 0.95) -> str:
    """Do the intervals cover, and what does resampling blocks cost? The table of `coverage.read_study`."""
    words = []
    for (size, unit), rows in study.groupby(["requests", "unit"], sort=False):
        below = rows[rows["coverage"] < level - TOLERANCE]
        found = (
            f"misses the truth too often ({listed(below['quantity'])})"
            if len(below)
            else ("holds the truth as often as it says")
        )
        words.append(f"with {size} requests per workload, resampling {unit} {found}")
    return sentence(words)


def price(claims: Claims) -> str:
    """Up to which drafter cost does the selector pay, and does it widen the regime against best-of-N?"""
    rho, margins = _one(claims, "break_even_rho"), [c for c in pick(claims, "margin:*") if c.low is not None]
    if rho is None or rho.value is None:
        reason = rho.reason.removeprefix("undefined: ") if rho else "not computed"
        return f"There is no break-even cost on this log: {reason}."
    better = [c.name.split(":")[1] for c in margins if c.low > ROUNDING]
    limit = render(rho, ".2f", bare=True)
    text = f"At its operating point the selector stops paying when a draft costs {limit} verifications"
    return text + (
        f"; choosing beats redrafting always at rho = {listed(better)}."
        if better
        else "; at none of the tabled prices does choosing beat redrafting always."
    )


def timings(costs: Costs | None) -> str:
    """Where the prices come from."""
    if costs is None:
        return (
            "This run has no timings, so prices are assumed and no seconds are given; the published model stands alone."
        )
    return f"Prices were measured on {_machine(costs)}."


def _machine(costs: Costs) -> str:
    hardware = costs.hardware
    machine = hardware.get("gpu") or hardware.get("cpu") or "a machine that is not recorded"
    return f"{machine}, {hardware.get('threads', '?')} threads"


def speed(decisions: pd.DataFrame, costs: Costs | None) -> str:
    """Does anything beat the dominant arm in modelled time, and on what machine? The table of
    `routing.decision_table`."""
    if "speed" not in decisions or costs is None:
        return "Without timings nothing is said about time."
    where = f"At the prices measured on {_machine(costs)},"
    rows = decisions[~decisions["policy"].str.contains("hindsight")]
    faster = rows[rows["speed_low"] > 1].sort_values("speed", ascending=False)
    if not len(faster):
        return f"{where} nothing is faster than always running the dominant arm."
    verb = "are" if len(faster) > 1 else "is"
    text = f"{where} {listed(faster['policy'])} {verb} faster than always running the dominant arm"
    plain = " (plain decoding among them: on this machine the dominant arm's drafts cost more than they save)"
    return text + (plain if (faster["policy"] == "plain decoding").any() else "") + "."


# ---- the original study


def reported(path: str | Path) -> list[Claim]:
    """The published figures as REPORTED claims, under the names that ours have."""
    with open(path, encoding="utf-8", newline="") as file:
        return [_reported(row) for row in csv.DictReader(file)]


def _reported(row: Mapping[str, str]) -> Claim:
    value: object = float(row["value"]) if row["unit"] else row["value"]
    if row["low"]:
        value = Estimate(
            value, float(row["low"]), float(row["high"]), 0.95, 0, "as reported, blocks resampled", 0, None
        )
    claim = make_claim(
        row["name"],
        value,
        label="REPORTED",
        unit=row["unit"],
        source=SOURCE,
        reason="" if row["low"] else "none was reported",
    )
    return replace(claim, n=None)


def prefixed(prefix: str, claims: Iterable[Claim]) -> list[Claim]:
    """The same claims under longer names, reported_NAME."""
    return [
        replace(claim, quantity=f"{prefix}_{claim.quantity}", headline=False, reason=claim.reason or "for comparison")
        for claim in claims
    ]


def compare(ours: Iterable[Claim], theirs: Iterable[Claim]) -> list[Row]:
    """Each reported figure, ours of the same name (None where this log has none), and a verdict of a few words."""
    mine = {claim.name: claim for claim in ours}
    return [(other, mine.get(other.name), judge(mine.get(other.name), other)) for other in theirs]


def judge(ours: Claim | None, theirs: Claim) -> str:
    """same or different (words); higher here, lower here, intervals overlap (numbers; a number without interval is a
    point).

    >>> from specsel.paper.claims import Label
    >>> ours = Claim("g", 0.2, "fraction", Label.MEASURED, 0.15, 0.25)
    >>> judge(ours, Claim("g", 0.133, "fraction", Label.REPORTED, 0.123, 0.142))
    'higher here'
    """
    if ours is None or ours.value is None:
        return "not measured here"
    if isinstance(theirs.value, str):
        return "same" if ours.value == theirs.value else "different"
    (low, high), (other_low, other_high) = (
        (c.value, c.value) if c.low is None or c.high is None else (c.low, c.high) for c in (ours, theirs)
    )
    if low > other_high:
        return "higher here"
    return "lower here" if high < other_low else "intervals overlap"


def replication(rows: Sequence[Row]) -> dict[str, str]:
    """Computed sentences about what carries over: gap, headroom, capture, verdicts, price."""
    words = {theirs.name: verdict for theirs, _, verdict in rows}
    verdicts = grouped(
        {name.partition(":")[2]: verdict for name, verdict in words.items() if name.startswith("verdict:")}
    )
    relation = {
        "higher here": "higher here than reported",
        "lower here": "lower here than reported",
        "intervals overlap": "not distinguishable from the reported one",
    }
    about = {
        "gap": ("The per-block oracle gap", "oracle_gap"),
        "headroom": ("The headroom of choosing by workload", "workload_headroom"),
        "capture": ("The share of the gap that the selector captures", "capture"),
        "price": ("The drafter cost up to which selection pays", "break_even_rho"),
    }
    found = {
        key: f"{what} is {relation.get(words.get(name, ''), 'not measured here')}."
        for key, (what, name) in about.items()
    }
    return found | {
        "selector": "Verdicts per held-out workload: "
        + "; ".join(f"{verdict} on {listed(where)}" for verdict, where in verdicts.items())
        + "."
    }
