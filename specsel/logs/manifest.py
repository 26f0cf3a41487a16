"""What stands beside the records of a log: the manifest of a run folder or the header of a plain file, the table of
requests, the hashes of files.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import pandas as pd

from specsel.logs.records import SCHEMA, Fault, LogError, file_entry, read_text, sha256_of

SETTINGS = ("arms", "path_arm", "draft_len", "label")  # what the records of one log have in common
UNLABELLED = "UNLABELLED"  # the label of a file that does not say where its numbers come from


@dataclass(frozen=True, slots=True)
class Source:
    """A run folder, or a plain file, as one of the parts of a log."""

    path: Path
    files: tuple[Path, ...]  # of records
    manifest: dict  # of the folder, or the header of the file; {} where it has none
    is_folder: bool
    faults: tuple[Fault, ...]


def source(path: Path, verify: bool) -> Source:
    """The files of a run folder or a plain file, what is said about them, and what is wrong with that."""
    if not path.is_dir():
        return Source(path, (path,), read_header(path), False, ())
    manifest = _read_manifest(path)
    entries = manifest["files"]
    listed = {entry["name"] for entry in entries}
    faults = [
        Fault(str(file), None, None, "is not listed in manifest.json; remove it or collect the run again")
        for file in sorted(path.glob("blocks_*.jsonl*"))
        if file.name not in listed
    ]
    faults += [fault for entry in entries if (fault := _file_fault(path, entry, verify))]
    files = (path / e["name"] for e in entries if e["name"].startswith("blocks_") and (path / e["name"]).exists())
    return Source(path, tuple(files), manifest, True, tuple(faults))


def merged(sources: Sequence[Source]) -> dict:
    """What all parts of a log say; LogError that names the setting in which two of them differ.

    A log of several parts is a new run: it keeps only the settings, with the runs that it was made of.
    """
    first = sources[0].manifest
    for other in sources[1:]:
        for name in SETTINGS:
            if other.manifest.get(name) != first.get(name):
                here, there = (json.dumps(m.get(name)) for m in (first, other.manifest))
                raise LogError(
                    f"{other.path}: its {name} is {there}, but that of {sources[0].path} is {here}; only logs of equal "
                    "settings can be read as one"
                )
    if len(sources) == 1:
        return first
    return {n: first[n] for n in SETTINGS if n in first} | {"merged": [s.manifest.get("run") for s in sources]}


def file_name(workload: str) -> str:
    """The file of a workload in a run folder: letters, digits and -_.~ stand for themselves, and no name is too long.

    >>> file_name("chat"), file_name("../a:b")
    ('blocks_chat.jsonl.gz', 'blocks_..%2Fa%3Ab.jsonl.gz')
    """
    name = quote(workload, safe="")
    return f"blocks_{name if len(name) <= 150 else name[:100] + '_' + sha256_of(name.encode())[:16]}.jsonl.gz"


def workload_of(name: str) -> str:
    """The workload that a file of a run folder is named after.

    >>> workload_of("blocks_..%2Fa%3Ab.jsonl.gz")
    '../a:b'
    """
    return unquote(name.removeprefix("blocks_").removesuffix(".gz").removesuffix(".jsonl"))


def is_header(record: object) -> bool:
    """Is this first line of a plain file about the file, and no record?"""
    return isinstance(record, dict) and isinstance(record.get("log"), dict) and "request" not in record


def header(manifest: dict) -> bytes:
    """The first line of a plain file: what its records do not say."""
    said = {name: manifest[name] for name in ("run", *SETTINGS) if name in manifest}
    return json.dumps({"schema": SCHEMA, "log": said}, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def read_header(path: Path) -> dict:
    """The header of a plain file, {} where it has none; LogError where it is not as it must be."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            record = json.loads(file.readline(1_000_000).decode("utf-8-sig"))
    except (OSError, EOFError, ValueError, zlib.error, RecursionError):
        return {}  # whoever reads the records says what is wrong
    if not is_header(record):
        return {}
    for name in _wrong_fields({"schema": record.get("schema"), "files": []} | record["log"]):
        raise LogError(f"{path}, line 1: field 'log.{name}' is not as in schema {SCHEMA}; {EXPECTED}")
    return record["log"]


EXPECTED = "expected label MEASURED, SIM or UNLABELLED, arms, path_arm, draft_len; restore it"


def read_table(path: Path) -> pd.DataFrame:
    """The request table of a run folder."""
    try:
        table = pd.DataFrame([json.loads(line) for line in read_text(path).split("\n") if line.strip()])
        if table[["workload", "request"]].duplicated().any():
            raise ValueError("a request is there twice")
    except (ValueError, KeyError) as error:
        raise LogError(f"{path}: is not a table of requests ({error}); collect it again") from None
    return table


def line_faults(found: Source) -> list[Fault]:
    """Files of a folder that have another number of lines than its manifest says."""
    entries = {entry["name"]: entry["lines"] for entry in found.manifest["files"]} if found.is_folder else {}
    counted = {file: file_entry(file)["lines"] for file in found.files if file.name in entries}
    return [
        Fault(str(f), None, "lines", f"is {entries[f.name]} in manifest.json, but the file has {n}; collect it again")
        for f, n in counted.items()
        if n != entries[f.name]
    ]


def _read_manifest(folder: Path) -> dict:
    """The manifest of a run folder; LogError where it is missing, unreadable or not as in the schema."""
    path = folder / "manifest.json"
    if not path.exists():
        raise LogError(
            f"{path}: is missing, so this is no finished run; "
            "finish it with `specsel collect` or name the .jsonl.gz files themselves"
        )
    try:
        manifest = json.loads(read_text(path))
    except ValueError as error:
        raise LogError(f"{path}: is not JSON ({error}); restore it or collect the run again") from None
    for name in _wrong_fields(manifest):
        raise LogError(
            f"{path}: field '{name}' is missing or not as in schema {SCHEMA} (schema, label MEASURED "
            "or SIM, arms, path_arm, draft_len, files with name, sha256, lines); restore it"
        )
    return manifest


def _wrong_fields(manifest: object) -> list[str]:
    """Fields of a manifest that are not as the schema says."""
    if not isinstance(manifest, dict):
        return ["schema"]
    arms, files, length = (manifest.get(n) for n in ("arms", "files", "draft_len"))
    named = isinstance(arms, list) and all(isinstance(a, str) and a for a in arms)
    fine = {
        "schema": manifest.get("schema") == SCHEMA,
        "label": manifest.get("label") in ("MEASURED", "SIM", UNLABELLED),
        "arms": named and 0 < len(arms) == len(set(arms)),
        "path_arm": manifest.get("path_arm") in (None, *(arms or ())),
        "draft_len": isinstance(length, int) and not isinstance(length, bool) and length > 0,
        "files": isinstance(files, list) and all(map(_is_entry, files)),
    }
    return [name for name, good in fine.items() if not good]


def _is_entry(entry: object) -> bool:
    """Does it name a file inside the folder, with hash and number of lines?"""
    name = entry.get("name") if isinstance(entry, dict) else None
    return isinstance(name, str) and name == Path(name).name and {"sha256", "lines"} <= entry.keys()


def _file_fault(folder: Path, entry: dict, verify: bool) -> Fault | None:
    """What is wrong with a file that the manifest lists, if anything."""
    path = folder / entry["name"]
    if not path.is_file():
        missing = "is missing, but manifest.json lists it; restore it or collect the run again"
        return Fault(str(path), None, None, missing)
    if not verify or (found := sha256_of(path.read_bytes())) == entry["sha256"]:
        return None
    changed = (
        f"is {found[:12]}..., but manifest.json says {str(entry['sha256'])[:12]}...: "
        "the file was changed after collection; restore it or collect the run again"
    )
    return Fault(str(path), None, "sha256", changed)
