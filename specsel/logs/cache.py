"""Columns that were read before, kept in the user's cache folder: losing them costs time and nothing else."""

from __future__ import annotations

import contextlib
import io
import json
import os
from functools import cache
from pathlib import Path

import numpy as np

from specsel.logs.files import home, sha256_of, write_bytes_atomically

WORTH = 100_000  # bytes of log files: smaller ones are read as fast from the log itself
LARGEST = 500_000_000  # bytes of all columns kept


@cache
def program() -> str:
    """Hash of the modules that read logs: another version checks everything again."""
    return sha256_of("".join(sha256_of(path) for path in sorted(Path(__file__).parent.glob("*.py"))).encode())


def _path(key: object) -> Path | None:
    """Where the columns of a log lie; None where no user is known, and so no place to keep anything."""
    folder = home() / "logs"
    name = sha256_of(json.dumps([program(), key]).encode())
    return folder / f"{name}.npz" if folder.is_absolute() else None


def load(key: object) -> tuple[dict[str, np.ndarray], dict] | None:
    """Arrays and facts that were saved under a key (what JSON can write); None where there are none or damaged ones."""
    path = _path(key)
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = dict(found)
            facts = json.loads(arrays.pop("facts").item())
    except Exception:  # no place, no archive, or whatever a damaged one raises: the log itself is read instead
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return arrays, facts


def save(key: object, arrays: dict[str, np.ndarray], facts: dict) -> None:
    """Keep arrays and facts under a key, and of all that was kept the latest only; in silence where nothing can be
    written."""
    path = _path(key)
    if path is None:
        return
    data = io.BytesIO()
    np.savez(data, facts=np.array(json.dumps(facts)), **arrays)
    with contextlib.suppress(OSError):
        write_bytes_atomically(path, data.getvalue())
        room = LARGEST
        for old in sorted(path.parent.glob("*.npz"), key=os.path.getmtime, reverse=True):
            room -= old.stat().st_size
            if room < 0:
                old.unlink()
