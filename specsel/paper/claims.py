"""Claims: the only road from a computed number to a sentence of the book.

A claim holds a value, its unit, a label (MEASURED, SIM, REPORTED), a 95 % interval or the reason why it has none, and
its origin. `specsel.paper.ledger` makes claims of a chapter's figures, `cite` turns a reference of the prose into text.
Nothing is computed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from specsel.logs import SpecselError

OF_AN_ESTIMATE = ("value", "low", "high", "level", "n", "method", "n_resamples", "seed")
FRACTIONS = """accepted capture capture_accepted contextual_gain coverage decoding first_token frontier_capture
frontier_redraft_rate gain gets_further margin oracle_block_headroom oracle_dp_headroom oracle_gap oracle_gap_accepted
oracle_gap_by_blocks oracle_request_headroom predicted_gain predicted_headroom redraft_rate redraft_replay_gain
seed_shift survival token_gain token_gain_accepted workload_headroom workload_headroom_on_path"""
RATIOS = """alpha_union best_of_n best_selector break_even_rho coefficient drafts_per_block importance max_alpha
neural_passes_per_block quality redraft_speed rho skill speed threshold transfer width_ratio"""
TOKENS = """best_fixed_efficiency block_efficiency difference held_out mean_accepted mean_best mean_dominant
over_best_fixed reversed_order subset workload_oracle_efficiency"""
COUNTS = """asked corpora draft_len ended_at_once exact median_output near near_ties positions prompts repeating
requests runs too_long training_prompts"""
MODELLED = "best_of_n best_selector margin redraft_speed speed tokens_per_s".split()  # by prices, not by a clock: [SIM]
UNITS = {  # quantity -> the one unit that it has everywhere: command line, tables, sentences, charts
    **dict.fromkeys(FRACTIONS.split(), "fraction"),
    **dict.fromkeys(RATIOS.split(), "ratio"),
    **dict.fromkeys(TOKENS.split(), "tokens/block"),
    **dict.fromkeys(COUNTS.split(), "count"),
    "tokens_per_s": "tokens/s",
}


class ClaimError(SpecselError):
    """A number that may not reach the book; the message says why and what to do."""


class Label(StrEnum):
    """Where a number comes from: a log or a clock, a simulation, somebody else's publication, or a file that does not
    say."""

    MEASURED = "MEASURED"
    SIM = "SIM"
    REPORTED = "REPORTED"
    UNLABELLED = "UNLABELLED"


@dataclass(frozen=True, slots=True)
class Claim:
    """One number (or verdict sentence) with everything that a reader needs to judge it."""

    quantity: str  # what it is a number of, a name in UNITS: "skill"
    value: float | int | str | bool | None  # None = undefined, `reason` says why; fractions are 0..1
    unit: str  # "fraction" (printed in per cent), "ratio", "tokens/block", "s", "count", "" ...
    label: Label
    low: float | None = None  # interval limits, same unit as value
    high: float | None = None
    level: float | None = None  # 0.95
    n: int | None = None  # requests behind the number
    method: str = ""  # how the interval was made, e.g. "BCa"
    origin: dict[str, str] = field(default_factory=dict)  # run, log_sha256, function; or source (REPORTED)
    headline: bool = False
    reason: str = ""  # why there is no interval, or no value
    keys: tuple[str, ...] = ()  # of what: workload, arm, ...; any text, with colons too
    n_resamples: int | None = None  # behind the interval
    seed: int | None = None

    @property
    def name(self) -> str:
        """The key inside its notebook, "skill:code"; for people and JSON, nothing takes it apart."""
        return ":".join((self.quantity, *self.keys))

    def to_dict(self) -> dict[str, Any]:
        """Name and all fields as plain JSON types, floats at 12 significant digits."""
        plain = {k: float(f"{v:.12g}") if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {"name": self.name} | plain | {"label": str(self.label), "keys": list(self.keys)}

    def content(self) -> dict[str, Any]:
        """`to_dict` without the place in a notebook: what has to agree when a cell runs twice."""
        return self.to_dict() | {"origin": {k: v for k, v in self.origin.items() if k != "function"}}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Claim:
        """The claim that `to_dict` wrote; other keys of the entry are left out."""
        found = {part.name: entry[part.name] for part in fields(cls)}
        return cls(**{**found, "label": Label(entry["label"]), "keys": tuple(entry["keys"])})

    def __str__(self) -> str:
        return render(self)


def make_claim(
    name: str | tuple[str, ...],
    value: Any,
    *,
    label: Label | str,
    unit: str = "",
    function: str = "",
    source: str = "",
    origin: Mapping[str, str] | None = None,
    headline: bool = False,
    reason: str = "",
    n: int | None = None,
) -> Claim:
    """Build and check a claim from a number, a sentence, or an Estimate (then interval, n, method, resamples and seed
    come with it); name: a quantity, or a tuple of a quantity and keys.

    Raises ClaimError for NaN or infinity, for a headline number without interval, for an undefined value without
    reason, and for a REPORTED claim without source.

    >>> str(make_claim("gap", 0.133, label="REPORTED", unit="fraction", source="a study", reason="none given"))
    '13.3 % [REPORTED]'
    """
    quantity, *keys = (name,) if isinstance(name, str) else name
    estimate = hasattr(value, "low")
    given = {key: getattr(value, key) for key in OF_AN_ESTIMATE} if estimate else {"value": value, "n": n}
    made = {key: _plain(":".join((quantity, *keys)), item) for key, item in given.items()}
    if estimate and not reason and made["method"].startswith(("undefined", "degenerate")):
        reason = made["method"]
    sources = {**(origin or {}), "function": function, "source": source}
    claim = Claim(
        quantity=quantity,
        keys=tuple(keys),
        unit=unit,
        label=Label.SIM if quantity in MODELLED and label != Label.REPORTED else Label(label),
        headline=headline,
        reason=reason,
        origin={key: str(item) for key, item in sources.items() if item},
        **made,
    )
    _check(claim)
    return claim


def dump_claims(claims: Any) -> bytes:
    """The bytes of a claims file: a list in strict JSON, in the given order, floats at 12 significant digits."""
    entries = [claim.to_dict() for claim in claims]
    return (json.dumps(entries, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_claims(folder: str | Path) -> dict[str, dict[str, Claim]]:
    """All claims files of a values folder: notebook -> name -> Claim."""
    files = sorted(Path(folder).glob("*.json"))
    found = {path.stem: map(Claim.from_dict, json.loads(path.read_text("utf-8"))) for path in files}
    return {notebook: {claim.name: claim for claim in claims} for notebook, claims in found.items()}


def format_value(value: Any, unit: str = "", spec: str = "", *, like: Any = None, bare: bool = False) -> str:
    """The one formatter of printed numbers; `like` fixes the scale (an interval limit follows its value), `bare` drops
    the unit.

    >>> format_value(0.1327, "fraction"), format_value(2.0613, "ratio"), format_value(0.0123, "s"), format_value(6361)
    ('13.3 %', '2.061', '12.3 ms', '6,361')
    """
    if value is None:
        return "undefined"
    if isinstance(value, (bool, str)):
        return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
    if spec:
        return format(value, spec)
    scale, digits, suffix = _scale(unit, value if like is None else like)
    text = f"{value * scale:,.{digits}f}"
    text = text.lstrip("-") if float(text.replace(",", "")) == 0 else text
    return text if bare or not suffix else f"{text} {suffix}"


def render(claim: Claim, spec: str = "", *, bare: bool = False, counts: bool = False) -> str:
    """The text of a claim: value [low, high] [LABEL], with `counts` also n; `bare` gives the value alone.

    >>> render(Claim("gap", 0.133, "fraction", Label.MEASURED, 0.123, 0.142, 0.95, 128, "BCa"), counts=True)
    '13.3 % [12.3, 14.2] [MEASURED], n = 128'
    """
    text = format_value(claim.value, claim.unit, spec)
    if bare or isinstance(claim.value, str):
        return text
    if claim.value is None and claim.reason:
        text += f" ({claim.reason.removeprefix('undefined: ')})"
    if claim.low is not None and claim.high is not None:
        low, high = (format_value(x, claim.unit, spec, like=claim.value, bare=True) for x in (claim.low, claim.high))
        text += f" [{low}, {high}]"
    return f"{text} [{claim.label}]" + (f", n = {claim.n:,}" if counts and claim.n is not None else "")


def describe_origin(found: Claim) -> str:
    """The hover text of a claim: label, sample, interval, run, log and function (or the source of a reported figure).

    >>> origin = {"run": "demo", "function": "oracle_gap"}
    >>> describe_origin(Claim("gap", 0.1, "fraction", "SIM", 0.0, 0.2, 0.95, 40, "BCa", origin, seed=7, n_resamples=99))
    'SIM; 95 % interval, BCa; 99 resamples, seed 7; n = 40 requests; run demo; computed by oracle_gap'
    """
    origin = found.origin
    parts = [
        str(found.label),
        f"{found.level:.0%} interval, {found.method}".replace("%", " %") if found.low is not None else found.reason,
        f"{found.n_resamples:,} resamples, seed {found.seed}" if found.low is not None and found.n_resamples else "",
        f"n = {found.n:,} requests" if found.n is not None else "",
        f"run {origin['run']}" if "run" in origin else "",
        f"log {origin['log_sha256'][:12]}" if "log_sha256" in origin else "",
        f"chapter {origin['notebook']}" if "notebook" in origin else "",
        f"computed by {origin['function']}" if "function" in origin else "",
        origin.get("source", ""),
    ]
    return "; ".join(part for part in parts if part)


def cite(claims: Mapping[str, Mapping[str, Claim]], reference: str) -> tuple[Claim, str]:
    """Resolve a reference of the prose, `notebook.name`, `notebook.name:.3f` or `notebook.name|value`, to claim and
    text.

    Names may hold colons ("skill:code"): the longest known name wins, the rest is a Python number format.
    Raises KeyError for an unknown notebook, name or variant.
    """
    notebook, _, rest = reference.strip().partition(".")
    known = claims.get(notebook, {})
    matches = [name for name in known if rest == name or rest.startswith((name + ":", name + "|"))]
    if not matches:
        raise KeyError(f"no claim '{rest}' in notebook '{notebook}'; known: {', '.join(sorted(known)) or 'none'}")
    name = max(matches, key=len)
    spec, bar, variant = rest[len(name) :].lstrip(":").partition("|")
    if bar and variant != "value":
        raise KeyError(f"unknown variant '|{variant}' of claim '{reference}'; only '|value' exists")
    return known[name], render(known[name], spec, bare=bool(bar))


def _check(claim: Claim) -> None:
    number = isinstance(claim.value, (int, float)) and not isinstance(claim.value, bool)
    interval = claim.low is not None and claim.high is not None
    if claim.headline and number and not interval:
        raise ClaimError(f"headline claim '{claim.name}' has no interval; pass the Estimate, not its value")
    if claim.value is None and not claim.reason:
        raise ClaimError(f"claim '{claim.name}' is undefined (None) without a reason; say why in reason=")
    if claim.label == Label.REPORTED and not claim.origin.get("source"):
        raise ClaimError(f"claim '{claim.name}' is REPORTED but names no source; say whose figure it is in source=")


def _plain(name: str, item: Any) -> Any:
    """A Python scalar from a Python or numpy one; NaN and infinity are refused."""
    item = item.item() if hasattr(item, "item") else item
    if isinstance(item, float) and not math.isfinite(item):
        raise ClaimError(f"claim '{name}' is {item}; an undefined number is None with a reason, never NaN or infinity")
    if item is not None and not isinstance(item, (bool, int, float, str)):
        raise ClaimError(f"claim '{name}' has type {type(item).__name__}; expected a number, a sentence or an Estimate")
    return item


def _scale(unit: str, value: float) -> tuple[float, int, str]:
    """Factor, decimals and printed unit."""
    if unit == "fraction":
        return 100.0, 1, "%"
    if unit == "s":
        power = 0 if abs(value) >= 1 else 3 if abs(value) >= 1e-3 else 6
        return 10.0**power, 1 if power else 2, {0: "s", 3: "ms", 6: "µs"}[power]
    digits = 0 if isinstance(value, int) or abs(value) >= 10_000 else 3
    return 1.0, digits, "" if unit in ("", "ratio", "count") else unit
