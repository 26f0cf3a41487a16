"""Files: what is told about damaged ones, how they are read and written, and where things lie.

Not handled here: what is in a log.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

DAMAGE = (
    *(OSError, EOFError, zlib.error, ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError),
    RecursionError,
)


class SpecselError(Exception):
    """Bad input, told in one sentence; the command line prints it and exits with status 2."""


class LogError(SpecselError):
    """A log that cannot be used: file, line and field, what was found, what was expected, what to do."""


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
        reason = known.get(type(fault), getattr(fault, "strerror", None) or str(fault).partition("\n")[0])
        raise error(Fault(str(path), None, None, f"cannot be read ({reason}); {hint}")) from fault


def home() -> Path:
    """Cache directory: the environment variable SPECSEL_HOME, else the platform's user cache."""
    return Path(os.environ.get("SPECSEL_HOME") or platformdirs.user_cache_dir("specsel"))


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


def read_text(path: Path) -> str:
    """Text of a plain or gzip file (several members allowed, byte-order mark dropped); LogError when unreadable."""
    with readable(path, "check the path"):
        data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        with readable(path, "the gzip archive is cut short or damaged, fetch or collect it again"):
            data = gzip.decompress(data)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise LogError(Fault(str(path), line, None, "is not UTF-8 text; a log is JSON lines, plain or gzip")) from None


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
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say which file
            error.filename = str(path)
        raise


def refuse_existing(path: Path) -> None:
    """LogError when there is a file, or a folder with something in it: nothing is overwritten."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise LogError(f"{path}: exists already and was left alone; name a new place or remove it first")


def sha256_of(data: bytes | Path) -> str:
    """Hexadecimal SHA-256 of some bytes, or of a file."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with open(data, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def line_count(text: str) -> int:
    """Number of lines of a text; the last one need not end."""
    return text.count("\n") + (not text.endswith("\n") and text != "")


def file_entry(path: Path | str) -> dict:
    """The manifest's entry for a file: name, sha256 of its bytes, number of its lines."""
    path = Path(path)
    return {"name": path.name, "sha256": sha256_of(path), "lines": line_count(read_text(path))}


def drafter_sha256(folder: Path) -> str:
    """Hash of a drafter's folder as a manifest states it: over the hashes of its weight and configuration files, by
    name; what tells of its training does not count."""
    told = ("training.json", "checkpoint.json")
    files = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".json") and p.name not in told]
    return sha256_of("".join(sha256_of(p) for p in sorted(files)).encode())
