"""Columns of logs that were read with every check, kept as arrays: reading them again takes a fraction of a second.

A file of the cache is named after the content of the log's files, so a changed log is read and checked anew. Damaged,
missing and unwritable files of the cache are ignored. Small logs are not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import platformdirs

from specsel.logs.columns import Columns
from specsel.logs.records import write_bytes_atomically

LAYOUT = 1  # raise when Columns or the checks change
SMALLEST = 200_000  # bytes of log files that are worth a file of the cache
LARGEST_NUMBER = 40  # files; the ones that were not used for longest go first
TEXTS, FLAT, TABLES = ("arms", "workloads", "requests", "notes"), ("context", "stats"), ("source", "path_arm")
ARRAYS = ("workload", "starts", "proposed", "accepted", "on_path", "position", "remaining")


def folder() -> Path:
    """Where the cache lies: $SPECSEL_HOME, else the user's cache folder."""
    return Path(os.environ.get("SPECSEL_HOME") or platformdirs.user_cache_dir("specsel")) / "logs"


def place(hashes: list[str], asked: object) -> Path:
    """The file of a log: ``hashes`` of its files, and whatever else decides how they are read."""
    return folder() / f"{hashlib.sha256(repr((LAYOUT, hashes, asked)).encode()).hexdigest()}.npz"


def load(path: Path) -> Columns | None:
    """The columns that `keep` wrote; None where there are none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, BadZipFile):
        with np.load(path, allow_pickle=False) as found:
            parts = {name: tuple(found[name].tolist()) for name in TEXTS} | {name: found[name] for name in ARRAYS}
            for name in FLAT:
                keys = (key.split("|", 1)[1] for key in found.files if key.startswith(f"{name}|"))
                parts[name] = {key: found[f"{name}|{key}"] for key in keys}
            parts |= {"source": found["source"] if "source" in found.files else None, "repeats": []}
            parts |= {"path_arm": str(found["path_arm"]) or None, "complete": bool(found["complete"])}
        os.utime(path)
        return Columns(**parts | {"notes": list(parts["notes"])})
    return None


def keep(path: Path, columns: Columns) -> None:
    """Write the columns of a log without fault or repeat; a folder that cannot be written is none of our business."""
    parts = {name: np.array(getattr(columns, name), dtype=str) for name in TEXTS}
    parts |= {name: getattr(columns, name) for name in ARRAYS} | {"path_arm": np.array(columns.path_arm or "")}
    parts |= {f"{name}|{key}": value for name in FLAT for key, value in getattr(columns, name).items()}
    parts |= {"complete": np.array(columns.complete)} | ({} if columns.source is None else {"source": columns.source})
    data = io.BytesIO()
    np.savez(data, **parts)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, data.getvalue())
        used = sorted(path.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime)
        for old in used[:-LARGEST_NUMBER]:
            old.unlink()
