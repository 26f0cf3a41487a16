"""Sentences that say why the selector works, or does not, from the tables of `diagnostics` and `routing`.

Another log changes them; nothing is computed here but words.
"""

from __future__ import annotations

import pandas as pd

from specsel.paper.tables import Claims
from specsel.paper.words import MATERIAL, grouped, keyed, listed, sentence


def explanation(spread: pd.DataFrame, claims: Claims) -> str:
    """Does the original's explanation hold: where the selector has least skill, its best feature hardly varies?

    From the table of `diagnostics.feature_spread` and the claims skill:WORKLOAD.
    """
    study = "the explanation of the original study"
    skills = {w: s for w, s in keyed(claims, "skill:*").items() if s is not None}
    ranked = spread.dropna(subset=["auc"]).groupby("feature")["auc"].mean()
    if len(skills) < 2 or not len(ranked):
        return sentence([f"{study} cannot be examined on this log", "fewer than two workloads have a skill"])
    best, weak = ranked.idxmax(), min(skills, key=skills.get)
    rows = spread[spread["feature"] == best].dropna(subset=["p75"]).set_index("workload")
    width = (rows["p75"] - rows["p25"]).astype(float)
    narrow = width.idxmin()
    if weak != narrow:
        return sentence(
            [
                f"{study} does not hold here: the skill is lowest on {weak}, but {best}, the feature that "
                f"ranks best by itself, varies least on {narrow}"
            ]
        )
    nearly = width[narrow] < width.drop(narrow).median() / 2
    holds, how = ("holds", "hardly varies") if nearly else ("holds in part", "varies least, though not by much")
    return sentence(
        [
            f"{study} {holds} here: on {weak}, where the skill is lowest, {best}, the feature that ranks best "
            f"by itself, {how}"
        ]
    )


def importance(table: pd.DataFrame) -> str:
    """Which feature does the selector lean on? The table of `diagnostics.importance`."""
    top = table.loc[table.groupby("workload", sort=False)["drop"].idxmax()] if len(table) else table
    top = top[top["low"] > 0]
    groups = grouped(dict(zip(top["workload"], top["feature"], strict=True)))
    found = sentence(f"on {listed(where)} the selector leans most on {name}" for name, where in groups.items())
    return found or "No feature by itself matters on any held-out workload."


def calibration(table: pd.DataFrame) -> str:
    """Does stated confidence mean what it says, per arm? The table of `diagnostics.reliability`."""
    words = {}
    for arm, rows in table.groupby("arm", sort=False):
        excess = (rows["blocks"] * (rows["confidence"] - rows["acceptance"])).sum() / rows["blocks"].sum()
        words[arm] = (
            "promises more than it keeps"
            if excess > MATERIAL
            else "promises less than it keeps"
            if excess < -MATERIAL
            else "keeps on the whole what it promises"
        )
    found = sentence(f"the confidence of {listed(arms)} {what}" for what, arms in grouped(words).items())
    return found or "No arm states a confidence on this log."


def enough(curve: pd.DataFrame) -> str:
    """How many logged blocks are enough? The table of `diagnostics.learning_curve`."""
    known = curve.dropna(subset=["skill", "low"]).astype({"skill": float, "low": float, "high": float})
    if not len(known):
        return "No number of training blocks gives a selector on this log."
    last = known.iloc[-1]
    if last["low"] <= 1:
        return "Even with all training blocks the selector does not beat random over the held-out workloads."
    beats, settled = (
        known[holds[::-1].cummin()[::-1]].iloc[0]["blocks"]
        for holds in (known["low"] > 1, known["skill"].between(last["low"], last["high"]))
    )
    return sentence(
        [
            f"from about {beats:,.0f} training blocks on the selector beats random",
            f"from about {settled:,.0f} on its skill lies in the interval that all blocks give",
        ]
    )


def transfers(table: pd.DataFrame) -> str:
    """Does a selector of one workload work on another? The table of `diagnostics.transfer`."""
    pairs = table[table["train"] != table["test"]].dropna(subset=["skill", "low"])
    if not len(pairs):
        return "No workload gives a selector that another could use."
    wins, losses = pairs["low"].astype(float) > 1, (pairs["high"].astype(float) < 1).sum()
    never = [w for w, won in wins.groupby(pairs["test"], sort=False) if not won.any()]
    parts = [
        f"a selector trained on one workload beats random on another in {wins.sum()} of {len(pairs)} pairs",
        f"it is worse than random in {losses}",
    ]
    return sentence(parts + ([f"none beats random on {listed(never)}"] if never else []))


def before_or_after(against: pd.DataFrame) -> str:
    """Which decision carries the value, routing before drafting or redrafting after it, and at which cost?

    The table of `routing.decision_table` with "redraft" as base: its gains and speeds are paired differences.
    """
    rows = against.set_index("policy")
    routes = rows[rows.index.str.fullmatch(r"route \(\w+\)")]
    if "redraft" not in rows.index or not len(routes):
        return "Routing and redrafting cannot be compared on this log."
    best, drafts = routes["gain"].astype(float).idxmax(), rows["drafts_per_block"]
    both, timed = f"{best} + redraft", [n for n in (best, f"{best} for time") if n in rows.index and "speed" in rows]
    parts = [
        f"in tokens, {best} {versus(rows.loc[best], 'gain', 0.0)} redrafting, with {drafts[best]:.2f} drafts per "
        f"block against {drafts['redraft']:.2f}"
    ]
    if both in rows.index:
        parts.append(f"doing both {versus(rows.loc[both], 'gain', 0.0)} redrafting alone, with {drafts[both]:.2f}")
    if timed:
        fastest = max(timed, key=lambda name: rows.loc[name, "speed"])
        parts.append(f"in modelled time, {fastest} {versus(rows.loc[fastest], 'speed', 1.0)} redrafting")
    return sentence(parts)


def versus(row: pd.Series, what: str, null: float) -> str:
    """How a paired comparison reads: its interval against the value of no difference."""
    low, high = row[f"{what}_low"], row[f"{what}_high"]
    if pd.isna(low) or low <= null <= high:
        return "cannot be told from"
    return "beats" if low > null else "loses to"
