"""One record of a position log: what it must hold, how it is checked, read and written.

A record is one JSON object per line: one position of one request, with what every arm proposed there and
how much of it the target accepted. Not handled here: anything that needs a second record (duplicates, gaps).
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

SCHEMA = 1
STATS = ("conf_mean", "conf_min", "conf_first", "ent_mean")  # of a draft: 0..1, 0..1, 0..1, nats
CONTEXT = ("match_length", "target_entropy", "target_confidence")  # before drafting: tokens, nats, 0..1
REQUIRED = ("workload", "request", "position", "remaining", "on_path", "arms")
RECORD_FIELDS = ("schema", *REQUIRED[:-1], "context", "arms")  # the order in which they are written
ARM_FIELDS = ("proposed", "accepted", *STATS, "match_length", "source")
LARGEST = {"position": 2**31 - 1, "remaining": 2**31 - 1, "proposed": 2**15 - 2, "accepted": 2**15 - 2}
DAMAGE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError, RecursionError)
SLACK = 2e-6  # statistics are written with six significant digits


class SpecselError(Exception):
    """Bad input, told in one sentence; the command line prints it and exits with status 2."""


class LogError(SpecselError):
    """A log that cannot be used: file, line and field, what was found, what was expected, what to do."""


@contextlib.contextmanager
def readable(
    path: str | Path, hint: str, error: type[SpecselError] = LogError, faults: tuple[type[Exception], ...] = DAMAGE
) -> Iterator[None]:
    """Around code that reads a file: what a damaged one raises (one of ``faults``) becomes one sentence with the reason
    and the ``hint`` what to do."""
    try:
        yield
    except SpecselError:
        raise
    except faults as fault:
        known = {
            KeyError: f"field {fault} is missing",
            FileNotFoundError: "there is no such file",
            json.JSONDecodeError: f"it is not JSON: {fault}",
        }
        reason = known.get(type(fault), str(fault).partition("\n")[0])
        raise error(f"{path}: cannot be read ({reason}); {hint}") from fault


def project_folder() -> Path | None:
    """The folder of the book: the present one, one above it, or the clone that the package is installed from; None
    outside of a clone."""
    places = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]]
    return next((p for p in places if (p / "_config.yml").is_file() and (p / "notebooks").is_dir()), None)


def located(path: str | Path) -> Path:
    """The path; a relative one that leads nowhere from here is taken from the folder of the book when it leads
    somewhere from there. JupyterLab, for one, runs a notebook in the notebook's own folder.
    """
    path, root = Path(path), project_folder()
    return root / path if root and not path.exists() and (root / path).exists() else path


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a log; ``str(fault)`` is the sentence a user reads."""

    file: str  # as the user named it
    line: int | None  # counted from 1; None when the whole file is meant
    field: str | None  # dotted, as in "arms.eagle.conf_min"; None when no field is meant
    message: str

    def __str__(self) -> str:
        where = self.file + (f", line {self.line}" if self.line else "")
        return f"{where}: " + (f"field '{self.field}' " if self.field else "") + self.message


class BareNumber(str):
    """NaN or Infinity as a bare word: Python reads it, JSON does not know it."""


DECODER = json.JSONDecoder(parse_constant=BareNumber)


def shown(value: object) -> str:
    """How a faulty value appears in a message: JSON, shortened."""
    if isinstance(value, BareNumber):
        return f"the bare word {value} (write null for a missing value)"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def whole_number_fault(value: object, least: int, largest: int = 2**31 - 1) -> str:
    """Why a value is not a whole number from ``least`` to ``largest``; empty when it is one.

    >>> whole_number_fault(2.0, 0), whole_number_fault(True, 0)
    ('', 'is true, expected a whole number')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value % 1:
        return f"is {shown(value)}, expected a whole number"
    if not least <= value <= largest:
        return f"is {shown(value)}, expected {least} or more" if value < least else f"is {shown(value)}, too large"
    return ""


def real_fault(value: object, highest: float) -> str:
    """Why a statistic is neither null nor a finite number from 0 to ``highest``; empty when it is.

    >>> real_fault(None, 1.0), real_fault(1.7, 1.0)
    ('', 'is 1.7, expected 0 to 1')
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is {shown(value)}, expected a number or null"
    if not math.isfinite(value) or not 0 <= value <= highest + SLACK:
        return f"is {value}, expected 0 to {highest:g}" if math.isfinite(highest) else f"is {value}, expected 0 or more"
    return ""


def text_fault(value: object) -> str:
    """Why a value is not a name; empty when it is one."""
    named = isinstance(value, str) and value and not isinstance(value, BareNumber)
    return "" if named and value.isprintable() else f"is {shown(value)}, expected a name (printable text)"


def highest_of(field: str) -> float:
    """The largest legal value of a statistic: 1 for probabilities, no bound for entropies."""
    return math.inf if "ent" in field.split("_") or field.endswith("entropy") else 1.0


def record_faults(
    record: object, arms: tuple[str, ...] | None = None, draft_len: int | None = None
) -> list[tuple[str | None, str]]:
    """Everything wrong with one record, as (field, message); ``arms`` and ``draft_len`` as the log has them.

    >>> record_faults([1, 2, 3])
    [(None, 'record is [1, 2, 3], expected an object with request, position and arms')]
    """
    if not isinstance(record, dict):
        return [(None, f"record is {shown(record)}, expected an object with request, position and arms")]
    found = [(f, f"is missing (schema {SCHEMA} has it)") for f in REQUIRED if f not in record]
    found += [
        (f, f"is {shown(record[f])}, but this program reads schema {SCHEMA} only; update specsel or convert the log")
        for f in ("schema", "schema_version")
        if f in record and (record[f] is True or record[f] != SCHEMA)
    ]
    checks = {
        "workload": text_fault,
        "request": text_fault,
        "position": lambda v: whole_number_fault(v, 0),
        "remaining": lambda v: whole_number_fault(v, 1),
        "on_path": lambda v: "" if isinstance(v, bool) else f"is {shown(v)}, expected true or false",
    }
    found += [(f, m) for f, check in checks.items() if f in record and (m := check(record[f]))]
    found += context_faults(record.get("context"))
    return found + (arms_faults(record, arms, draft_len) if "arms" in record else [])


def context_faults(context: object) -> list[tuple[str, str]]:
    """Everything wrong with the context of a record (absent is legal)."""
    if context is None:
        return []
    if not isinstance(context, dict):
        return [("context", f"is {shown(context)}, expected an object")]
    found = [(f"context.{f}", real_fault(context.get(f), highest_of(f))) for f in CONTEXT[1:]]
    found.append(("context.match_length", match_fault(context.get("match_length"))))
    return [(f, m) for f, m in found if m]


def match_fault(value: object) -> str:
    """Why a match length is neither null nor a whole number; empty when it is."""
    return "" if value is None else whole_number_fault(value, 0)


def arms_faults(record: dict, arms: tuple[str, ...] | None, draft_len: int | None) -> list[tuple[str, str]]:
    """Everything wrong with the arms of a record."""
    found, given = [], record["arms"]
    if not isinstance(given, dict) or not given:
        return [("arms", f"is {shown(given)}, expected an object with one entry per arm")]
    names = tuple(given) if arms is None else arms
    found += [(f"arms.{n}", f"is an unknown arm, expected {', '.join(names)}") for n in given if n not in names]
    found += [
        (f"arms.{n}", 'is missing; an arm that was not asked has "proposed":null') for n in names if n not in given
    ]
    left = record.get("remaining")
    left = LARGEST["remaining"] if whole_number_fault(left, 1) else left
    for name in (n for n in names if n in given):
        found += [
            (f"arms.{name}" + (f".{f}" if f else ""), m) for f, m in arm_faults(given[name], left, names, draft_len)
        ]
    return found


def arm_faults(arm: object, remaining: int, names: tuple[str, ...], draft_len: int | None) -> list[tuple[str, str]]:
    """Everything wrong with one arm's entry."""
    if not isinstance(arm, dict):
        return [("", f"is {shown(arm)}, expected an object with proposed and accepted")]
    found = [(f, real_fault(arm.get(f), highest_of(f))) for f in STATS]
    found.append(("match_length", match_fault(arm.get("match_length"))))
    if arm.get("source") not in (None, *names):
        found.append(("source", f"is {shown(arm['source'])}, expected one of the arms {', '.join(names)}"))
    low = arm.get("conf_min")
    found += [
        ("conf_min", f"is {low}, above {f} = {arm[f]}")
        for f in ("conf_mean", "conf_first")
        if not any(real_fault(v, 1) or v is None for v in (low, arm.get(f))) and low > arm[f] + SLACK
    ]
    return [(f, m) for f, m in found if m] + count_faults(arm, remaining, draft_len)


def count_faults(arm: dict, remaining: int, draft_len: int | None) -> list[tuple[str, str]]:
    """Everything wrong with an arm's proposed and accepted counts (bonus excluded)."""
    if "proposed" not in arm:
        return [("proposed", "is missing; null means that the arm was not asked")]
    proposed, accepted = arm["proposed"], arm.get("accepted")
    if proposed is None:
        legal = accepted is None or (accepted == 0 and not isinstance(accepted, bool))
        return [] if legal else [("accepted", f"is {shown(accepted)}, but proposed is null (not asked)")]
    found = [
        (f, m)
        for f, v in (("proposed", proposed), ("accepted", accepted))
        if (m := whole_number_fault(v, 0, LARGEST[f]))
    ]
    if found:
        return found
    limits = {"proposed": proposed, "remaining": remaining}
    found = [("accepted", f"is {accepted}, above {n} = {v}") for n, v in limits.items() if accepted > v]
    return found + (
        [("proposed", f"is {proposed}, above the draft length {draft_len}")]
        if draft_len is not None and proposed > draft_len
        else []
    )


def parse_line(text: str) -> object:
    """The JSON value of one line; ValueError with a sentence when the line is not exactly one value."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # slower, but it says what is wrong, and bare words like NaN are named by field
        text = text.strip()
    try:
        value, end = DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not a complete JSON object ({error.msg}, column {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("is nested too deeply to be a record") from None
    if text[end:].strip():
        raise ValueError(f"holds more than one object (text after column {end}); were two processes writing this file?")
    return value


def read_text(path: Path) -> str:
    """Text of a plain or gzip file (several members allowed, byte-order mark dropped); LogError when unreadable."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise LogError(
                f"{path}: the gzip archive is cut short or damaged ({error}); fetch or collect it again"
            ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise LogError(f"{path}, line {line}: is not UTF-8 text; a log is JSON lines, plain or gzip") from None


def plain(value: object, field: str) -> object:
    """A Python value for JSON: numpy scalars converted, nan to None, floats to six significant digits."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float) or value != value:
        return None if isinstance(value, float) else value
    if math.isinf(value):
        raise LogError(f"field '{field}' is infinite and was not written; a log holds finite numbers or null")
    return float(f"{value:.6g}")


def encode_row(record: Mapping) -> bytes:
    """One line of a log, ready to append: strict JSON, keys in schema order, missing values null, byte-deterministic.

    Parameters: ``record`` has the schema's keys except ``schema``; ``arms`` and ``context`` map names to values,
    where nan means missing. Raises LogError instead of writing a record that the reader would refuse.

    >>> encode_row({"workload": "w", "request": "w/0", "position": 0, "remaining": 3, "on_path": True,
    ...             "arms": {"a": {"proposed": 9, "accepted": 2, "conf_mean": 1 / 3, "conf_min": float("nan")}}})
    b'{"schema":1,"workload":"w","request":"w/0","position":0,"remaining":3,"on_path":true,"arms":{"a":{"proposed":9,"accepted":2,"conf_mean":0.333333,"conf_min":null}}}\\n'
    """
    row = {"schema": SCHEMA, **{f: plain(record[f], f) for f in REQUIRED[:-1]}}
    if record.get("context"):
        row["context"] = {f: plain(record["context"][f], f) for f in CONTEXT if f in record["context"]}
    row["arms"] = {
        name: {f: plain(arm[f], f"{name}.{f}") for f in ARM_FIELDS if f in arm} for name, arm in record["arms"].items()
    }
    for field, message in record_faults(row):
        raise LogError(f"{row['request']}, position {row['position']}: field '{field}' {message}; nothing was written")
    return json.dumps(row, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def gzip_bytes(data: bytes) -> bytes:
    """A gzip member without time or name, so that equal input gives equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as stream:
        stream.write(data)
    return buffer.getvalue()


def write_bytes_atomically(path: Path | str, data: bytes) -> None:
    """Write under a temporary name, flush to disk, rename: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def sha256_of(data: bytes) -> str:
    """Hexadecimal SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def file_entry(path: Path | str) -> dict:
    """The manifest's entry for a file: name, sha256 of its bytes, number of its lines."""
    path = Path(path)
    text = read_text(path)
    lines = text.count("\n") + (not text.endswith("\n") and text != "")
    return {"name": path.name, "sha256": sha256_of(path.read_bytes()), "lines": lines}
