"""When more accepted tokens become less time: the published break-even formula, and the same question with measured
costs.

The published model (original study, section "break-even") charges every drafter pass the same rho. `Costs` replaces it
with medians of measured seconds: t_draft per arm and context length, t_verify per number of rows, catch-up and
overhead. Not handled here: intervals, fitted numbers.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specsel.logs.records import SpecselError, readable


class CostError(SpecselError):
    """A cost or rate that cannot be: the message names it, the range, and the next step."""


# ---- the published model: one rho for every drafter


def relative_speed(gap: float, capture: float, rate: float, rho: float, alpha: float = 0.0) -> float:
    """Modelled speed of redrafting over always using the dominant arm: (1 + c G)(1 + rho) / (1 + rho + r (rho +
    alpha)).

    gap G >= 0, capture c and redraft rate r in 0..1, rho and alpha >= 0 in verifications. Raises CostError otherwise.

    >>> round(relative_speed(0.133, 0.61, 0.43, 0.10), 6)
    1.040458
    """
    _check_gain(gap, capture, rate)
    _check("rho", rho, math.inf)
    _check("alpha", alpha, math.inf)
    return float((1 + capture * gap) * (1 + rho) / (1 + rho + rate * (rho + alpha)))


def best_of_n(gap: float, rho: float, alpha: float = 0.0) -> float:
    """Speed of running the second drafter on every block and keeping the best (capture and redraft rate are 1).

    >>> [round(best_of_n(0.133, rho), 3) for rho in (0.02, 0.05, 0.15, 0.20)]
    [1.111, 1.081, 1.002, 0.971]
    """
    return relative_speed(gap, 1.0, 1.0, rho, alpha)


def break_even_rho(gap: float, capture: float, rate: float, alpha: float = 0.0) -> float | None:
    """Largest rho up to which redrafting is no slower than never redrafting; 0 = never pays, inf = always, None = never
    redrafts.

    >>> round(break_even_rho(0.133, 0.61, 0.43), 3)
    0.233
    """
    _check_gain(gap, capture, rate)
    _check("alpha", alpha, math.inf)
    found = float(break_even_rhos(np.float64(gap * capture), np.float64(rate), alpha))
    return None if math.isnan(found) else found


def break_even_rhos(token_gain: np.ndarray, rate: np.ndarray, alpha: float = 0.0) -> np.ndarray:
    """`break_even_rho` for arrays (token gain = capture x gap), unchecked; nan where nothing is redrafted."""
    gain, rate = np.asarray(token_gain, dtype=float), np.asarray(rate, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(
            gain <= rate * alpha, 0.0, np.where(gain >= rate, np.inf, (gain - rate * alpha) / (rate - gain))
        )
    return np.where(rate > 0, found, np.nan)


def max_alpha(gap: float, capture: float, rate: float, rho: float = 0.0) -> float | None:
    """Largest alpha at which redrafting is no slower than never redrafting, c G (1 + rho) / r - rho; None = never
    redrafts.

    >>> round(max_alpha(0.133, 0.61, 0.43), 2)
    0.19
    """
    _check_gain(gap, capture, rate)
    _check("rho", rho, math.inf)
    return max(0.0, capture * gap * (1 + rho) / rate - rho) if rate > 0 else None


def best_selector(
    captures: Iterable[float], rates: Iterable[float], gap: float, rho: float, alpha: float = 0.0
) -> tuple[float, int]:
    """Highest relative speed over a threshold frontier, and its index (the first on ties).

    >>> best_selector([0.0, 0.6, 1.0], [0.0, 0.4, 1.0], gap=0.133, rho=0.2)[1]
    1
    """
    speeds = [relative_speed(gap, c, r, rho, alpha) for c, r in zip(captures, rates, strict=True)]
    if not speeds:
        raise CostError("the frontier is empty, so no threshold can be best; give at least one (capture, rate) pair")
    best = int(np.argmax(speeds))
    return speeds[best], best


# ---- measured costs: one curve per arm


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary of repeated timings of one thing."""

    median_s: float  # seconds
    low_s: float  # first quartile
    high_s: float  # third quartile
    n: int  # timings kept
    dropped: int  # warm-up calls left out


def summarise_timings(seconds: Iterable[float], *, warmup: int) -> Spread:
    """Median and quartiles of timings in call order, without the first `warmup` calls.

    >>> summarise_timings([9.0, 1.0, 1.2, 1.1], warmup=1).median_s
    1.1
    """
    values = np.asarray(list(seconds), dtype=float)
    if len(values) <= warmup:
        raise CostError(f"{len(values)} timings and {warmup} warm-up calls leave nothing to summarise; time more calls")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise CostError("a timing is negative or not finite; measure again")
    low, median, high = (float(x) for x in np.quantile(values[warmup:], (0.25, 0.5, 0.75)))
    return Spread(median, low, high, len(values) - warmup, warmup)


@dataclass(frozen=True, slots=True)
class Costs:
    """Median seconds of every part of a block, interpolated over context length (and rows), constant beyond the
    measured range.
    """

    spreads: Mapping[tuple[str, str | int | None, int | None], Spread]  # (what, arm or rows, context) -> timings
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms whose drafts were timed."""
        return tuple(dict.fromkeys(of for what, of, _ in self.spreads if what == "t_draft"))

    def draft_s(self, arm: str, context: np.ndarray | float) -> np.ndarray:
        """Seconds of one draft of `arm` at these context lengths."""
        return self._curve("t_draft", arm, context)

    def catch_up_s(self, arm: str, context: np.ndarray | float) -> np.ndarray:
        """Seconds to bring the cache of an arm that sat out up to the committed text; 0 when not measured (nothing to
        bring up).
        """
        return self._curve("catch_up", arm, context) if self._points("catch_up", arm) else np.zeros(np.shape(context))

    def verify_s(self, rows: np.ndarray | float, context: np.ndarray | float) -> np.ndarray:
        """Seconds of one target pass over `rows` tokens (drafted tokens + 1); rows = 1 is plain decoding."""
        sizes = sorted({key[1] for key in self.spreads if key[0] == "t_verify"})
        if not sizes:
            raise CostError("no t_verify was measured, so no speed can be given; run `specsel time`")
        rows, context = np.broadcast_arrays(np.asarray(rows, dtype=float), np.asarray(context, dtype=float))
        curves = np.stack([self._curve("t_verify", size, context) for size in sizes])
        at = np.clip(np.interp(rows, sizes, np.arange(len(sizes))), 0, len(sizes) - 1)
        below = np.floor(at).astype(int)
        above = np.minimum(below + 1, len(sizes) - 1)
        take = np.take_along_axis
        low, high = (take(curves, i[None], axis=0)[0] for i in (below, above))
        return low + (at - below) * (high - low)

    @property
    def overhead_s(self) -> float:
        """Seconds per block that no other part explains; 0 when not measured."""
        found = self.spreads.get(("overhead", None, None))
        return found.median_s if found else 0.0

    def block_s(
        self,
        arms: tuple[str, ...],
        proposed: np.ndarray,
        context: np.ndarray,
        *,
        ran: np.ndarray | None = None,
        rows: np.ndarray | None = None,
        stale: np.ndarray | None = None,
    ) -> np.ndarray:
        """(B,) seconds of blocks: drafts of the arms that ran + one verification + catch-up of the stale ones +
        overhead.

        proposed (B, K) drafted tokens; context (B,) tokens before the draft; ran, stale (B, K) bool; rows (B,) rows of
        the verification, by default 1 + all drafted tokens (an upper bound when drafts share tokens).
        """
        ran = np.ones(proposed.shape, dtype=bool) if ran is None else ran
        rows = 1 + np.where(ran, np.maximum(proposed, 0), 0).sum(axis=1) if rows is None else rows
        total = self.verify_s(rows, context) + self.overhead_s
        for k, arm in enumerate(arms):
            if ran[:, k].any():
                total = total + np.where(ran[:, k], self.draft_s(arm, context), 0.0)
                if stale is not None:
                    total = total + np.where(ran[:, k] & stale[:, k], self.catch_up_s(arm, context), 0.0)
        return total

    def rho(self, arm: str, draft_len: int, context: float) -> float:
        """Measured rho of one arm: a draft's seconds over those of a verification of draft_len + 1 rows."""
        return float(self.draft_s(arm, context) / self.verify_s(draft_len + 1, context))

    def alpha(self, draft_len: int, context: float) -> float:
        """Measured alpha of union verification: extra seconds of verifying two drafts at once over those of one."""
        one, two = (float(self.verify_s(1 + m * draft_len, context)) for m in (1, 2))
        return two / one - 1

    def table(self) -> pd.DataFrame:
        """One row per timed thing: median, quartiles, number of timings, dropped warm-up calls."""
        rows = [
            {
                "what": what,
                "of": "" if of is None else str(of),
                "context": context,
                "median_s": s.median_s,
                "low_s": s.low_s,
                "high_s": s.high_s,
                "n": s.n,
                "dropped": s.dropped,
            }
            for (what, of, context), s in self.spreads.items()
        ]
        return pd.DataFrame(rows)

    def _points(self, what: str, of: str | int) -> list[tuple[int, float]]:
        return sorted((c or 0, s.median_s) for (w, o, c), s in self.spreads.items() if w == what and o == of)

    def _curve(self, what: str, of: str | int, context: np.ndarray | float) -> np.ndarray:
        points = self._points(what, of)
        if not points:
            raise CostError(f"no {what} of '{of}' was measured, so no speed can be given; time it with `specsel time`")
        return np.interp(context, *zip(*points, strict=True))


def read_costs(timings: Mapping[str, Any]) -> Costs:
    """Costs from the content of timings.json; the first `warmup` samples of each (what, arm, rows, context) are
    dropped.

    Raises CostError when a sample has no seconds, or too few samples are left.
    """
    groups: dict[tuple, list[float]] = defaultdict(list)
    for number, sample in enumerate(timings.get("samples", [])):
        if not isinstance(sample.get("seconds"), Real) or "what" not in sample:
            raise CostError(
                f"timings.json, sample {number}: needs 'what' and a number 'seconds', found {sample}; "
                "run `specsel time` again"
            )
        groups[sample["what"], sample.get("arm", sample.get("rows")), sample.get("context")].append(sample["seconds"])
    if not groups:
        raise CostError("timings.json holds no samples, so no speed can be given; run `specsel time`")
    warmup = int(timings.get("warmup", 0))
    return Costs(
        {key: summarise_timings(values, warmup=warmup) for key, values in groups.items()}, timings.get("hardware", {})
    )


def load_costs(run: str | Path) -> Costs | None:
    """Costs from timings.json of a run folder; None where the run was not timed."""
    path = Path(run) / "timings.json"
    if not path.is_file():
        return None
    with readable(path, f"run `specsel time {run}` again", CostError):
        return read_costs(json.loads(path.read_text("utf-8")))


def _check_gain(gap: float, capture: float, rate: float) -> None:
    _check("gap", gap, math.inf)
    _check("capture", capture, 1.0)
    _check("redraft rate", rate, 1.0)


def _check(name: str, value: Any, highest: float) -> None:
    if value is None:
        raise CostError(f"{name} is not known (None), so no speed can be given; time it (`specsel time`) or state it")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CostError(f"{name} is {value!r}, which is no number; give a number")
    if not 0 <= value <= highest or math.isinf(value):
        expected = f"from 0 to {highest:g}" if highest < math.inf else ">= 0"
        raise CostError(f"{name} is {value}; expected a finite number {expected}")
