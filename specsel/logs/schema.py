"""What a record and a manifest must hold: one schema, and the sentence for every way to break it.

A record is one JSON object per line: one position of one request, with what every arm proposed there and how much of it
the target accepted. Not handled here: what compares fields or records (accepted above proposed, repeats, gaps).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError, ValidationInfo
from typing_extensions import TypedDict

SCHEMA = 1
SLACK = 2e-6  # statistics are written with six significant digits
OPEN = ConfigDict(extra="allow")  # unknown fields are read over and told


def _different(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("different names")
    return names


def _one_of_the_arms(name: str | None, info: ValidationInfo) -> str | None:
    if name not in (None, *info.data.get("arms", [name])):
        raise ValueError("one of the arms")
    return name


# Strict: neither true nor "3" is a number; a whole number may be written 3.0.
Whole = Annotated[float, Strict(), Field(ge=0, le=2**31 - 1, multiple_of=1, allow_inf_nan=False)]
Count = Annotated[float, Strict(), Field(ge=0, le=2**15 - 2, multiple_of=1, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1 + SLACK, allow_inf_nan=False)]
Nats = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[^\p{Cc}]+$")]  # any text of one line: kept byte for byte
Version = Annotated[float, Strict(), Field(ge=SCHEMA, le=SCHEMA)]


class Context(TypedDict, total=False):
    """What is known before drafting; null = missing."""

    __pydantic_config__ = OPEN
    match_length: Whole | None  # tokens
    target_entropy: Nats | None
    target_confidence: Share | None


class Draft(TypedDict):
    """What one arm drafted at a position; null = the arm has no such value."""

    __pydantic_config__ = OPEN
    proposed: Count | None  # null: the arm was not asked
    accepted: NotRequired[Count | None]  # bonus excluded
    conf_mean: NotRequired[Share | None]
    conf_min: NotRequired[Share | None]
    conf_first: NotRequired[Share | None]
    ent_mean: NotRequired[Nats | None]
    match_length: NotRequired[Whole | None]
    source: NotRequired[str | None]  # the arm whose draft a composite arm used


class Record(TypedDict):
    """One line of a log."""

    __pydantic_config__ = OPEN
    schema: NotRequired[Version]
    workload: Name
    request: Name
    position: Whole  # index of the anchor in the output
    remaining: Annotated[Whole, Field(ge=1)]  # output tokens after the anchor
    on_path: Annotated[bool, Strict()]  # a block of the path arm starts here
    context: NotRequired[Context | None]
    arms: Annotated[dict[Name, Draft], Field(min_length=1)]
    schema_version: NotRequired[Version]  # what older logs call it


class Listed(TypedDict):
    """A file as the manifest lists it."""

    name: Annotated[str, Field(pattern=r"^[^/\\\p{Cc}]+$")]
    sha256: str
    lines: Annotated[int, Strict()]


class Manifest(TypedDict):
    """What is said about a log; further fields tell where it comes from."""

    __pydantic_config__ = OPEN
    schema: Version
    label: Literal["MEASURED", "SIM", "UNLABELLED"]
    run: NotRequired[Name]
    arms: Annotated[list[Name], Field(min_length=1), AfterValidator(_different)]
    path_arm: Annotated[str | None, AfterValidator(_one_of_the_arms)]
    draft_len: Annotated[int, Strict(), Field(ge=1, le=2**15 - 2)]


class RunManifest(Manifest):
    """What a run folder says of itself."""

    files: list[Listed]


class Head(TypedDict):
    """First line of a plain file: what a folder says in its manifest and table of requests."""

    manifest: Manifest
    requests: NotRequired[list[dict] | None]


RECORD, MANIFEST, HEAD = TypeAdapter(Record), TypeAdapter(RunManifest), TypeAdapter(Head)
RECORD_FIELDS, DRAFT_FIELDS, CONTEXT = (tuple(kind.__annotations__) for kind in (Record, Draft, Context))
STATS = ("conf_mean", "conf_min", "conf_first", "ent_mean")  # of a draft: 0..1, 0..1, 0..1, nats

EXPECTED = {  # what pydantic calls a fault: what was expected
    "float_type": "a number",
    "int_type": "a whole number",
    "multiple_of": "a whole number",
    "finite_number": "a finite number (write null for a missing value)",
    "greater_than_equal": "{least:.10g} or more",
    "less_than_equal": "{most:.10g} or less",
    "string_type": "a name (text of one line)",
    "string_unicode": "a name (text of one line)",
    "string_pattern_mismatch": "a name (text of one line)",
    "bool_type": "true or false",
    "dict_type": "an object",
    "list_type": "a list",
    "too_short": "one entry or more",
    "literal_error": "{expected}",
    "value_error": "{error}",
}
HINTS = {"proposed": "null means that the arm was not asked"}
SYNTAX = {  # what the parser says: what is told
    "trailing characters": "holds more than one object ({at}); were two processes writing this file?",
    "recursion limit": "is nested too deeply to be a record ({at})",
}


def faults_of(error: ValidationError) -> list[tuple[str | None, str]]:
    """Every fault that validation found, as (dotted field or None, what is wrong with it)."""
    return [_told(**found) for found in error.errors(include_url=False)]


def _told(type: str, loc: tuple, input: object, ctx: dict | None = None, **_) -> tuple[str | None, str]:
    field = ".".join(map(str, loc)) or None
    if type == "json_invalid":
        at = str(ctx["error"]).replace("line 1 ", "")
        known = (sentence for name, sentence in SYNTAX.items() if name in at)
        return field, next(known, "is not a complete JSON object ({at})").format(at=at)
    if type == "missing":
        return field, "is missing; " + HINTS.get(loc[-1], f"schema {SCHEMA} has it")
    if loc[-1:] in (("schema",), ("schema_version",)):
        hint = f"this program reads schema {SCHEMA} only; update specsel or convert the log"
        return field, f"is {shown(input)}, but {hint}"
    limits = {n: round(ctx[k], 5) for n, k in (("least", "ge"), ("most", "le")) if k in (ctx or {})}
    expected = EXPECTED.get(type, type.replace("_", " ")).format(**limits, **(ctx or {}))
    return field, f"{'is' if field else 'holds'} {shown(input)}, expected {expected}"


def shown(value: object) -> str:
    """How a faulty value appears in a message: JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def repeated_keys(line: str) -> list[str]:
    """Dotted names of the keys that stand more than once in one object of a JSON text.

    >>> repeated_keys('{"arms":{"a":{"accepted":0,"accepted":4},"b":{}}}')
    ['arms.a.accepted']
    """
    found: list[str] = []

    def walk(value: object, above: str) -> None:
        if isinstance(value, tuple):  # an object, as its pairs
            found.extend(f"{above}{key}" for key, n in Counter(key for key, _ in value).items() if n > 1)
            for key, inner in value:
                walk(inner, f"{above}{key}.")

    walk(json.loads(line, object_pairs_hook=tuple), "")
    return found
