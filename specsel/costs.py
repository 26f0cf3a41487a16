"""When more accepted tokens become less time: the published break-even formula, and measured costs in its place.

The published model (original study, section "break-even") charges every drafter pass the same rho. `Costs` replaces it
with medians of measured seconds: t_draft per arm and context length, t_verify per number of rows, catch-up and
overhead. Not handled here: intervals, fitted numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specsel.logs import SpecselError, readable
from specsel.stats import ratio


class CostError(SpecselError):
    """A cost or rate that cannot be: the message names it, the range, and the next step."""


Number = float | np.ndarray  # the formulas take numbers, or arrays that broadcast; nan in an array stays nan

# ---- the published model: one rho for every drafter


def relative_speed(gap: Number, capture: Number, rate: Number, rho: Number, alpha: Number = 0.0) -> Number:
    """Modelled speed of redrafting over always using the dominant arm: (1 + c G)(1 + rho) / (1 + rho + r (rho +
    alpha)).

    gap G >= 0, capture c and redraft rate r in 0..1, rho and alpha >= 0 in verifications. Raises CostError otherwise.

    >>> round(relative_speed(0.133, 0.61, 0.43, 0.10), 6)
    1.040458
    """
    _check_all(gap, capture, rate, rho=rho, alpha=alpha)
    return (1 + capture * gap) * (1 + rho) / (1 + rho + rate * (rho + alpha))


def best_of_n(gap: Number, rho: Number, alpha: Number = 0.0) -> Number:
    """Speed of running the second drafter on every block and keeping the best (capture and redraft rate are 1).

    >>> [round(best_of_n(0.133, rho), 3) for rho in (0.02, 0.05, 0.15, 0.20)]
    [1.111, 1.081, 1.002, 0.971]
    """
    return relative_speed(gap, 1.0, 1.0, rho, alpha)


def break_even_rho(gap: Number, capture: Number, rate: Number, alpha: Number = 0.0) -> Number:
    """Largest rho up to which redrafting is no slower than never redrafting; 0 = never pays, inf = always, nan = never
    redrafts.

    >>> round(float(break_even_rho(0.133, 0.61, 0.43)), 3)
    0.233
    """
    _check_all(gap, capture, rate, alpha=alpha)
    gain, spent = capture * gap - rate * alpha, rate - capture * gap
    found = np.where(gain <= 0, 0.0, np.where(spent <= 0, np.inf, ratio(gain, spent)))
    return np.where(np.asarray(rate) > 0, found, np.nan)[()]


def max_alpha(gap: Number, capture: Number, rate: Number, rho: Number = 0.0) -> Number:
    """Largest alpha at which redrafting is no slower than never redrafting, c G (1 + rho) / r - rho; nan = never
    redrafts.

    >>> round(float(max_alpha(0.133, 0.61, 0.43)), 2)
    0.19
    """
    _check_all(gap, capture, rate, rho=rho)
    return np.maximum(0.0, ratio(capture * gap * (1 + rho), rate) - rho)


def _check_all(gap: Number, capture: Number, rate: Number, **prices: Number) -> None:
    highest = {"capture": 1.0, "redraft rate": 1.0}
    for name, value in {"gap": gap, "capture": capture, "redraft rate": rate, **prices}.items():
        _check(name, value, highest.get(name, math.inf))


def _check(name: str, value: Any, highest: float) -> None:
    """CostError for what is no number, or out of range; nan is refused as a number and tolerated in an array."""
    if value is None:
        raise CostError(f"{name} is not known (None), so no speed can be given; time it (`specsel time`) or state it")
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iuf":
        raise CostError(f"{name} is {value!r}, which is no number; give a number")
    fine = (numbers >= 0) & (numbers <= highest) & ~np.isinf(numbers) | (np.isnan(numbers) & (numbers.ndim > 0))
    if not fine.all():
        expected = f"from 0 to {highest:g}" if highest < math.inf else ">= 0"
        raise CostError(f"{name} is {numbers[~fine].flat[0]}; expected a finite number {expected}")


# ---- measured costs: one curve per arm


@dataclass(frozen=True, slots=True)
class Costs:
    """Median seconds of every part of a block, interpolated over context length (and rows), constant beyond the
    measured range.
    """

    table: pd.DataFrame  # one row per timed thing: what, of (arm or rows), context, median_s, low_s, high_s, n, dropped
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms whose drafts were timed."""
        return tuple(self.table[self.table.what == "t_draft"].of.unique())

    def draft_s(self, arm: str, context: Number) -> Number:
        """Seconds of one draft of `arm` at these context lengths."""
        return self._curve("t_draft", arm, context)

    def catch_up_s(self, arm: str, context: Number) -> Number:
        """Seconds to bring the cache of an arm that sat out up to the committed text; 0 where not measured."""
        timed = ((self.table.what == "catch_up") & (self.table.of == arm)).any()
        return self._curve("catch_up", arm, context) if timed else np.zeros(np.shape(context))

    def verify_s(self, rows: Number, context: Number) -> np.ndarray:
        """Seconds of one target pass over `rows` tokens (drafted tokens + 1); rows = 1 is plain decoding."""
        sizes = np.unique(self.table[self.table.what == "t_verify"].of.astype(int))
        if not len(sizes):
            raise CostError("no t_verify was measured, so no speed can be given; run `specsel time`")
        rows, context = np.broadcast_arrays(np.asarray(rows, dtype=float), np.asarray(context, dtype=float))
        curves = np.stack([self._curve("t_verify", size, context) for size in sizes])
        at = np.interp(rows, sizes, np.arange(len(sizes)))  # between which sizes, as a fraction
        below, last = np.floor(at).astype(int), len(sizes) - 1
        low, high = (np.take_along_axis(curves, np.minimum(i, last)[None], axis=0)[0] for i in (below, below + 1))
        return low + (at - below) * (high - low)

    @property
    def overhead_s(self) -> float:
        """Seconds per block that no other part explains; 0 when not measured."""
        return float(self.table[self.table.what == "overhead"].median_s.sum())

    def block_s(
        self,
        arms: Sequence[str],
        context: np.ndarray,
        *,
        ran: np.ndarray,
        rows: np.ndarray,
        stale: np.ndarray | None = None,
    ) -> np.ndarray:
        """(B,) seconds of blocks: drafts of the arms that ran + one verification of ``rows`` (B,) tokens + catch-up of
        the stale ones + overhead.

        context (B,) tokens before the draft; ran, stale (B, K) bool.
        """
        total = self.verify_s(rows, context) + self.overhead_s
        for k in np.flatnonzero(ran.any(axis=0)):
            total = total + np.where(ran[:, k], self.draft_s(arms[k], context), 0.0)
            if stale is not None:
                total = total + np.where(ran[:, k] & stale[:, k], self.catch_up_s(arms[k], context), 0.0)
        return total

    def rho(self, arm: str, draft_len: int, context: float) -> float:
        """Measured rho of one arm: a draft's seconds over those of a verification of draft_len + 1 rows."""
        return float(self.draft_s(arm, context) / self.verify_s(draft_len + 1, context))

    def alpha(self, draft_len: int, context: float) -> float:
        """Measured alpha of union verification: extra seconds of verifying two drafts at once over those of one."""
        one, two = (float(self.verify_s(1 + m * draft_len, context)) for m in (1, 2))
        return two / one - 1

    def _curve(self, what: str, of: str | int, context: Number) -> Number:
        points = self.table[(self.table.what == what) & (self.table.of == of)].sort_values("context")
        if not len(points):
            raise CostError(f"no {what} of '{of}' was measured, so no speed can be given; time it with `specsel time`")
        return np.interp(context, points.context.fillna(0), points.median_s)


def read_costs(timings: Mapping[str, Any]) -> Costs:
    """Costs from the content of timings.json: median and quartiles of each (what, arm or rows, context), without its
    first `warmup` samples.

    Raises CostError when a sample has no seconds, or too few samples are left.
    """
    samples, warmup = timings.get("samples", []), int(timings.get("warmup", 0))
    for number, sample in enumerate(samples):
        seconds = sample.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or "what" not in sample:
            raise CostError(
                f"timings.json, sample {number}: needs 'what' and a number 'seconds', found {sample}; "
                "run `specsel time` again"
            )
        if not 0 <= seconds < math.inf:
            raise CostError(f"timings.json, sample {number}: a timing is negative or not finite; measure again")
    if not samples:
        raise CostError("timings.json holds no samples, so no speed can be given; run `specsel time`")
    keys = [(s["what"], s.get("arm", s.get("rows")), s.get("context")) for s in samples]
    table = pd.DataFrame(keys, columns=["what", "of", "context"]).assign(s=[s["seconds"] for s in samples])
    groups = table.groupby(["what", "of", "context"], sort=False, dropna=False)
    kept = table[groups.cumcount() >= warmup].groupby(["what", "of", "context"], sort=False, dropna=False).s
    if len(kept) < len(groups):
        raise CostError(f"{warmup} warm-up calls leave nothing of some timings; time more calls with `specsel time`")
    quartiles = kept.quantile([0.25, 0.5, 0.75]).unstack().set_axis(["low_s", "median_s", "high_s"], axis=1)
    return Costs(quartiles.assign(n=kept.size(), dropped=warmup).reset_index(), timings.get("hardware", {}))


def load_costs(run: str | Path) -> Costs | None:
    """Costs from timings.json of a run folder; None where the run was not timed."""
    path = Path(run) / "timings.json"
    if not path.is_file():
        return None
    with readable(path, f"run `specsel time {run}` again", CostError):
        return read_costs(json.loads(path.read_text("utf-8")))
