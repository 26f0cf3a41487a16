"""The live engine against replay, as the check of a run tells it: a small table per run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median_high
from typing import Any

import pandas as pd

from specsel.logs import LogError, PositionLog, beside, read_log, readable

FILE = "engine_check.json"
COLUMNS = ("arm", "requests", "equal", "blocks", "differences", "first_difference", "largest_margin")
OUTPUTS = ("same_output", "output_parts", "output_margin")


def engine_check(run: str | Path, log: PositionLog) -> pd.DataFrame:
    """Live engine against replay, per arm: requests, equal (in every block), blocks, differences, median output index
    of the first difference of a request, largest margin of a difference.

    And against plain decoding: requests with the same output, median index at which the others part, largest margin
    there; missing in older checks. Empty when the run has no check. Raises LogError when the check belongs to another
    log. A margin is the distance between the two best logits of the target: a difference at a margin of rounding size
    is a tie.
    """
    path = Path(run) / FILE
    if not path.is_file():
        return pd.DataFrame(columns=[*COLUMNS, *OUTPUTS])
    with readable(path, "run the engine check again (`specsel collect --check all`)"):
        found = json.loads(path.read_text("utf-8"))
        rows = [
            (arm, *(int(c[name]) for name in ("requests", "equal", "blocks")), len(c["differences"]))
            + _first(c["differences"])
            + (c.get("same_output"), *_first(c.get("output_differences", [])))
            for arm, c in found["arms"].items()
        ]
    if found.get("log_sha256") != log.sha256:
        raise LogError(f"{path}: field 'log_sha256' belongs to another log; run the engine check again on this run")
    table = pd.DataFrame(rows, columns=[*COLUMNS, *OUTPUTS])
    return table.astype(dict.fromkeys(("first_difference", "same_output", "output_parts"), "Int64"))


def _first(differences: Iterable[Mapping[str, Any]]) -> tuple[int | None, float | None]:
    """Median position and largest margin; None without any."""
    found = [(int(d["position"]), float(d["margin"])) for d in differences]
    return (median_high(p for p, _ in found), max(m for _, m in found)) if found else (None, None)


def checks_beside(run: str | Path, ending: str) -> pd.DataFrame:
    """`engine_check` of the runs beside a run (see `logs.beside`) with the precision of each; empty without one."""
    checks = []
    for path in beside(run, ending):
        log = read_log(path)
        precision = log.manifest.get("dtype", "a precision that is not recorded")
        checks.append(engine_check(path, log).assign(precision=precision))
    return pd.concat(checks) if checks else pd.DataFrame(columns=[*COLUMNS, *OUTPUTS, "precision"])
