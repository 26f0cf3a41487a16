"""Position logs as columns: reading with every check, writing, and the block view.

A log holds, for every position of every request's greedy output, what each arm proposed there and how much of it
the target accepts, so that any policy replays exactly. Not handled here: averages over policies, intervals, figures.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from glob import escape, glob
from pathlib import Path

import numpy as np
import pandas as pd

from specsel.logs.columns import Columns, read_columns, walk
from specsel.logs.records import (
    CONTEXT,
    SCHEMA,
    STATS,
    Fault,
    LogError,
    SpecselError,
    encode_row,
    file_entry,
    gzip_bytes,
    read_text,
    readable,
    sha256_of,
    write_bytes_atomically,
)

__all__ = [
    "STATS",
    "CONTEXT",
    "SpecselError",
    "LogError",
    "LogWarning",
    "Fault",
    "PositionLog",
    "BlockLog",
    "read_log",
    "write_log",
    "block_view",
    "validate",
    "summary",
    "convert",
    "require_complete",
    "encode_row",
    "file_entry",
    "readable",
    "write_bytes_atomically",
]


class LogWarning(UserWarning):
    """Something in a log that is tolerated and worth knowing: identical repeats, unknown fields."""


@dataclass(frozen=True, slots=True)
class PositionLog:
    """One row per position; requests are contiguous, positions ascend inside them (R requests, N rows, K arms)."""

    arms: tuple[str, ...]  # K names; an arm is its index, ties go to the lowest
    draft_len: int  # L, cap on drafted tokens per block
    workloads: tuple[str, ...]  # W names
    requests: tuple[str, ...]  # R ids, unique inside their workload
    workload: np.ndarray  # (R,) index into workloads
    starts: np.ndarray  # (R+1,) rows of request r are starts[r]:starts[r+1]
    proposed: np.ndarray  # (N, K) int16, 0..L; -1 = the arm was not asked
    accepted: np.ndarray  # (N, K) int16, 0..proposed, bonus excluded; 0 where not asked
    on_path: np.ndarray  # (N,) bool, as logged: a block of path_arm starts here
    position: np.ndarray  # (N,) int32, index of the anchor in the output, 0..T-1
    remaining: np.ndarray  # (N,) int32, output tokens after the anchor, T - position
    context: dict[str, np.ndarray]  # name -> (N,) float64, known before drafting; nan = missing
    stats: dict[str, np.ndarray]  # name -> (N, K) float64, known once the arm has drafted; nan = missing
    source: np.ndarray | None  # (N, K) int8: arm whose draft a composite arm used; -1 none, -2 one outside of the pool
    complete: bool  # every position of every request is here: exact replay is allowed
    run: str  # name of the run
    label: str  # "MEASURED" or "SIM"
    path_arm: str | None  # arm whose blocks on_path marks; None when no arm fits
    sha256: str  # over the log files; "" when the log comes from no file
    request_table: pd.DataFrame | None = None  # one row per request: workload, request, category, looping, ...
    manifest: dict = field(default_factory=dict)  # manifest.json of the run folder, {} for plain files

    @property
    def n_positions(self) -> int:
        """Number of rows N."""
        return len(self.position)

    @property
    def n_requests(self) -> int:
        """Number of requests R that have at least one position."""
        return len(self.requests)

    @property
    def n_arms(self) -> int:
        """Number of arms K."""
        return len(self.arms)

    @property
    def emitted(self) -> np.ndarray:
        """(N, K) int16: accepted + 1, cut at the end of the output; computed at each access, so keep it."""
        longest = np.iinfo(np.int16).max
        return np.minimum(self.accepted + np.int16(1), np.minimum(self.remaining, longest).astype(np.int16)[:, None])

    @property
    def request_of(self) -> np.ndarray:
        """(N,) int64: the request of every row."""
        return np.repeat(np.arange(self.n_requests), np.diff(self.starts))

    @property
    def looping(self) -> np.ndarray | None:
        """(R,) bool: requests whose output repeats itself (less than half of its 4-grams distinct); None: unknown."""
        return None if (found := self.request_column("looping")) is None else found.astype(bool)

    def request_column(self, name: str) -> np.ndarray | None:
        """(R,) values of one column of the request table, in the order of ``requests``; None when it is not there."""
        table = self.request_table
        if table is None or name not in table or table[name].isna().any():
            return None
        values = table.set_index(["workload", "request"])[name]
        keys = [(self.workloads[w], r) for w, r in zip(self.workload, self.requests, strict=False)]
        return values.loc[keys].to_numpy() if values.index.is_unique and set(keys) <= set(values.index) else None

    def select(self, requests: np.ndarray) -> PositionLog:
        """The log of some requests only (bool mask or indices, order kept as given); arms and workloads stay."""
        chosen = np.arange(self.n_requests)[requests]
        lengths = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(self.starts[chosen] - starts[:-1], lengths) + np.arange(starts[-1])
        return replace(
            self,
            requests=tuple(self.requests[r] for r in chosen),
            workload=self.workload[chosen],
            starts=starts,
            context={n: v[rows] for n, v in self.context.items()},
            stats={n: v[rows] for n, v in self.stats.items()},
            source=None if self.source is None else self.source[rows],
            **{n: getattr(self, n)[rows] for n in ("proposed", "accepted", "on_path", "position", "remaining")},
        )

    def only(self, workloads: Iterable[str]) -> PositionLog:
        """The log of some workloads only, in the order of the log; SpecselError for one that it does not have."""
        names = _chosen(self.run, "workload", workloads, self.workloads)
        kept = [w for w, name in enumerate(self.workloads) if name in names]
        log = self.select(np.isin(self.workload, kept))
        code = np.searchsorted(kept, log.workload)
        return replace(log, workloads=tuple(self.workloads[w] for w in kept), workload=code)

    def pool(self, arms: Iterable[str]) -> PositionLog:
        """The log of some arms only, in the order given: exact, because every arm was asked at every position.

        SpecselError for an arm that the log does not have. The source of a composite arm that leaves is -2.
        """
        names = _chosen(self.run, "arm", arms, self.arms)
        at = [self.arms.index(name) for name in names]
        code = np.array([*(names.index(name) if name in names else -2 for name in self.arms), -2, -1], dtype=np.int8)
        source = None if self.source is None else code[self.source[:, at]]
        return replace(
            self,
            arms=names,
            proposed=self.proposed[:, at],
            accepted=self.accepted[:, at],
            stats={n: v[:, at] for n, v in self.stats.items()},
            source=None if source is None or (source == -1).all() else source,
            path_arm=self.path_arm if self.path_arm in names else None,
        )

    def cap(self, draft_len: int) -> PositionLog:
        """The log with drafts of at most ``draft_len`` tokens: exact, since accepted is the smaller of count and cap.

        Statistics over a draft that is cut are unknown (nan); the first confidence stays.
        """
        if not 1 <= draft_len <= self.draft_len:
            raise SpecselError(f"{self.run}: a draft length of {draft_len} is not in 1 to {self.draft_len}, as logged")
        cut, whole = self.proposed > draft_len, ("conf_first", "match_length")
        capped = replace(
            self,
            draft_len=draft_len,
            proposed=np.minimum(self.proposed, np.int16(draft_len)),
            accepted=np.minimum(self.accepted, np.int16(draft_len)),
            stats={n: v if n in whole else np.where(cut, np.nan, v) for n, v in self.stats.items()},
        )
        if self.complete and self.path_arm is not None:
            starts = np.zeros(self.n_positions, dtype=bool)
            starts[walk(self.starts, capped.emitted[:, self.arms.index(self.path_arm)])] = True
            capped = replace(capped, on_path=starts)
        return capped

    @property
    def composites(self) -> tuple[str, ...]:
        """Arms that hand on other arms' drafts: fixed rules that are themselves selectors."""
        if self.source is None:
            return ()
        return tuple(name for name, used in zip(self.arms, (self.source != -1).any(axis=0), strict=True) if used)

    @property
    def table(self) -> pd.DataFrame:
        """One row per request (R): workload, request, and what the request table says about it (nan = unknown)."""
        keys = {"workload": np.array(self.workloads, dtype=object)[self.workload], "request": list(self.requests)}
        found = pd.DataFrame(keys, columns=["workload", "request"])
        return found if self.request_table is None else found.merge(self.request_table, how="left", on=[*keys])


def _chosen(run: str, kind: str, asked: Iterable[str], there: tuple[str, ...]) -> tuple[str, ...]:
    """Names that were asked for; SpecselError where there are none, one twice, or one that the log does not have."""
    names = tuple(asked)
    unknown = [name for name in names if name not in there]
    if unknown or not names or len(set(names)) < len(names):
        what = f"has no {kind} {unknown[0]!r}" if unknown else f"needs one or more different {kind}s, got {names}"
        raise SpecselError(f"{run}: {what}; it has {', '.join(there)}")
    return names


@dataclass(frozen=True, slots=True)
class BlockLog:
    """The rows where blocks of one arm start when it always runs (B blocks): a round per row, never to be replayed."""

    arms: tuple[str, ...]  # K names
    draft_len: int  # L
    workloads: tuple[str, ...]  # W names
    requests: tuple[str, ...]  # R ids
    workload: np.ndarray  # (R,) index into workloads
    request_of: np.ndarray  # (B,) request of every block
    rows: np.ndarray  # (B,) row of every block in the position log
    proposed: np.ndarray  # (B, K) -1 = not asked
    accepted: np.ndarray  # (B, K) bonus excluded
    emitted: np.ndarray  # (B, K) accepted + 1, cut at the end of the output
    stats: dict[str, np.ndarray]  # name -> (B, K), nan = missing
    context: dict[str, np.ndarray]  # name -> (B,), nan = missing
    path_arm: str | None  # the arm whose blocks these are

    @property
    def n_blocks(self) -> int:
        """Number of blocks B."""
        return len(self.rows)

    @property
    def workload_of(self) -> np.ndarray:
        """(B,) workload of every block."""
        return self.workload[self.request_of]


def require_complete(log: PositionLog) -> None:
    """Refuse exact replay on a log that holds block starts only."""
    if not log.complete:
        raise LogError(
            f"{log.run}: this log is block-anchored (only the blocks of {log.path_arm or 'one arm'} are in it), "
            "so no other policy can be replayed exactly; gap and selector figures are allowed, "
            "replay needs a log of every position (`specsel collect`)"
        )


def block_view(log: PositionLog, arm: int | None = None) -> BlockLog:
    """The blocks of ``arm`` (default: ``log.path_arm``) when it always runs.

    Recomputed by walking on a complete log; on a block-anchored log the logged blocks, there for its path arm only.
    """
    names = log.arms
    arm = names.index(log.path_arm) if arm is None and log.path_arm in names else arm
    name = None if arm is None else names[arm]
    emitted = log.emitted
    if log.complete and arm is not None:
        rows = walk(log.starts, emitted[:, arm])
    elif name == log.path_arm:
        rows = np.flatnonzero(log.on_path)
    else:
        require_complete(log)
    return BlockLog(
        names,
        log.draft_len,
        log.workloads,
        log.requests,
        log.workload,
        request_of=np.searchsorted(log.starts, rows, side="right") - 1,
        rows=rows,
        proposed=log.proposed.take(rows, axis=0),
        accepted=log.accepted.take(rows, axis=0),
        emitted=emitted.take(rows, axis=0),
        stats={n: v.take(rows, axis=0) for n, v in log.stats.items()},
        context={n: v.take(rows, axis=0) for n, v in log.context.items()},
        path_arm=name,
    )


# ---- reading


def read_log(path: str | Path | Iterable[str | Path], *, verify: bool = True) -> PositionLog:
    """Read a run folder, or one or several .jsonl / .jsonl.gz files that form one log.

    Any line order gives the same log: workloads in the order of the files (by name inside a file), requests by name.
    ``verify=False`` skips the hashes of the manifest only. Raises LogError with the first fault and how many there are.
    """
    log, faults, repeats = _read(path, verify)
    if faults:
        n = len(faults) - 1
        more = f" ({n} more fault{'s' * (n > 1)}: `specsel log validate` names them all)" if n else ""
        raise LogError(f"{faults[0]}{more}")
    if repeats:
        warnings.warn(
            f"{len(repeats)} identical repeats of a line were read once, the first: {repeats[0]}",
            LogWarning,
            stacklevel=2,
        )
    return log


def read_logs(run: str | Path, ending: str) -> list[PositionLog]:
    """The logs of the run folders beside a run whose names are its own and an ending (a glob pattern), by name; an
    empty list where there are none."""
    return [read_log(path) for path in beside(run, ending)]


def beside(run: str | Path, ending: str) -> list[Path]:
    """The run folders beside a run whose names are its own and an ending (a glob pattern), by name."""
    return [Path(path) for path in sorted(glob(escape(str(Path(run))) + ending))]


def validate(path: str | Path | Iterable[str | Path]) -> list[Fault]:
    """All faults of a run folder, or of one or several files that form one log, in order of file and line."""
    try:
        _, faults, repeats = _read(path, verify=True)
    except LogError as error:
        name, _, message = str(error).partition(": ")
        return [Fault(name, None, None, message)]
    return sorted(faults + repeats, key=lambda f: (f.file, f.line or 0, f.field or ""))


def _read(path, verify: bool) -> tuple[PositionLog | None, list[Fault], list[Fault]]:
    """The log (None when nothing usable is there), all faults, and the identical repeats."""
    one = isinstance(path, (str, Path))
    folder = Path(path) if one and Path(path).is_dir() else None
    manifest, faults = _read_manifest(folder, verify) if folder else ({}, [])
    names = [entry["name"] for entry in manifest.get("files", []) if entry["name"].startswith("blocks_")]
    files = [Path(p) for p in ([path] if one else path)]
    if folder:
        files = [folder / n for n in names if (folder / n).exists()]
    if not files:
        return None, faults or [Fault(str(path), None, None, "holds no log files (blocks_<workload>.jsonl.gz)")], []
    columns, found = read_columns(
        files,
        arms=tuple(manifest["arms"]) if manifest else None,
        draft_len=manifest.get("draft_len"),
        named=folder is not None,
        path_arm=manifest.get("path_arm"),
    )
    for note in columns.notes:
        warnings.warn(note, LogWarning, stacklevel=4)
    table = None
    if folder and not faults and (folder / "requests.jsonl.gz").exists():
        table = _read_table(folder / "requests.jsonl.gz")
    faults = faults + found
    if not len(columns.position):
        return None, faults or [Fault(str(files[0]), None, None, "is empty: it holds no record; collect it again")], []
    return _position_log(columns, files, manifest, table), faults, columns.repeats


def _position_log(columns: Columns, files: list[Path], manifest: dict, table: pd.DataFrame | None) -> PositionLog:
    """Columns with what the manifest says about them; ``sha256`` is over the hashes of the files, in their order."""
    given = {f.name: getattr(columns, f.name) for f in fields(columns) if f.name not in ("notes", "repeats")}
    digest = sha256_of("".join(sha256_of(f.read_bytes()) for f in files).encode())
    run = manifest.get("run") or re.sub(r"\.jsonl(\.gz)?$", "", files[0].name)
    return PositionLog(
        **given,
        draft_len=manifest.get("draft_len", max(int(columns.proposed.max()), 0)),
        run=run,
        label=manifest.get("label", "MEASURED"),
        sha256=digest,
        request_table=table,
        manifest=manifest,
    )


def _read_table(path: Path) -> pd.DataFrame:
    """The request table of a run folder."""
    try:
        table = pd.DataFrame([json.loads(line) for line in read_text(path).split("\n") if line.strip()])
        if table[["workload", "request"]].duplicated().any():
            raise ValueError("a request is there twice")
    except (ValueError, KeyError) as error:
        raise LogError(f"{path}: is not a table of requests ({error}); collect it again") from None
    return table


def _read_manifest(folder: Path, verify: bool) -> tuple[dict, list[Fault]]:
    """The manifest of a run folder and its faults: unreadable, another schema, files missing, changed or not listed."""
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
    for field_name in _wrong_fields(manifest):
        raise LogError(
            f"{path}: field '{field_name}' is missing or not as in schema {SCHEMA} (schema, label MEASURED "
            "or SIM, arms, path_arm, draft_len, files with name, sha256, lines); restore it"
        )
    listed = {entry["name"] for entry in manifest["files"]}
    faults = [
        Fault(str(f), None, None, "is not listed in manifest.json; remove it or collect the run again")
        for f in sorted(folder.glob("blocks_*.jsonl*"))
        if f.name not in listed
    ]
    return manifest, faults + [f for entry in manifest["files"] if (f := _file_fault(folder, entry, verify))]


def _wrong_fields(manifest: object) -> list[str]:
    """Fields of a manifest that are not as the schema says."""
    if not isinstance(manifest, dict):
        return ["schema"]
    arms, files, length = (manifest.get(n) for n in ("arms", "files", "draft_len"))
    named = isinstance(arms, list) and all(isinstance(a, str) and a for a in arms)
    fine = {
        "schema": manifest.get("schema") == SCHEMA,
        "label": manifest.get("label") in ("MEASURED", "SIM"),
        "arms": named and 0 < len(arms) == len(set(arms)),
        "path_arm": manifest.get("path_arm") in (None, *(arms or ())),
        "draft_len": isinstance(length, int) and not isinstance(length, bool) and length > 0,
        "files": isinstance(files, list)
        and all(
            isinstance(e, dict)
            and isinstance(e.get("name"), str)
            and e["name"] == Path(e["name"]).name
            and {"sha256", "lines"} <= e.keys()
            for e in files
        ),
    }
    return [name for name, good in fine.items() if not good]


def _file_fault(folder: Path, entry: dict, verify: bool) -> Fault | None:
    """What is wrong with a file that the manifest lists, if anything."""
    path = folder / entry["name"]
    if not path.is_file():
        return Fault(
            str(path), None, None, "is missing, but manifest.json lists it; restore it or collect the run again"
        )
    if not verify:
        return None
    if (found := sha256_of(path.read_bytes())) != entry["sha256"]:
        return Fault(
            str(path),
            None,
            "sha256",
            f"is {found[:12]}..., but manifest.json says {str(entry['sha256'])[:12]}...: "
            "the file was changed after collection; restore it or collect the run again",
        )
    lines = file_entry(path)["lines"]
    return (
        None
        if lines == entry["lines"]
        else Fault(
            str(path),
            None,
            "lines",
            f"is {entry['lines']} in manifest.json, but the file has {lines}; collect the run again",
        )
    )


# ---- writing


def log_rows(log: PositionLog, workload: int) -> Iterable[dict]:
    """The records of one workload, in the order of the log; fields that an arm nowhere has are left out."""
    kept = [[n for n, v in log.stats.items() if not np.isnan(v[:, k]).all()] for k in range(log.n_arms)]
    whole = [(n, v.astype(object)) for n, v in (("proposed", log.proposed), ("accepted", log.accepted))]
    for request in np.flatnonzero(log.workload == workload):
        for row in range(log.starts[request], log.starts[request + 1]):
            asked = log.proposed[row] >= 0
            arms = {
                name: {n: v[row, k] if asked[k] else None for n, v in whole}
                | {n: _number(n, log.stats[n][row, k]) for n in kept[k]}
                for k, name in enumerate(log.arms)
            }
            if log.source is not None:
                arms = {
                    n: a if s < 0 else a | {"source": log.arms[s]}
                    for (n, a), s in zip(arms.items(), log.source[row], strict=True)
                }
            yield {
                "workload": log.workloads[workload],
                "request": log.requests[request],
                "position": log.position[row],
                "remaining": log.remaining[row],
                "on_path": log.on_path[row],
                "context": {n: _number(n, v[row]) for n, v in log.context.items()},
                "arms": arms,
            }


def _number(name: str, value: float) -> float | int:
    """Match lengths are whole numbers in a file, everything else is real; nan stays."""
    return int(value) if name == "match_length" and value == value else value


def write_log(folder: str | Path, log: PositionLog, manifest_extra: Mapping | None = None) -> Path:
    """Write a log as a run folder (a gzip file per workload, request table, manifest); equal logs give equal bytes."""
    folder = Path(folder)
    _refuse_existing(folder)
    names = []
    for w in sorted(set(log.workload.tolist())):
        names.append(f"blocks_{log.workloads[w]}.jsonl.gz")
        write_bytes_atomically(folder / names[-1], gzip_bytes(b"".join(map(encode_row, log_rows(log, w)))))
    if log.request_table is not None:
        names.append("requests.jsonl.gz")
        text = log.request_table.to_json(orient="records", lines=True, force_ascii=False)
        write_bytes_atomically(folder / names[-1], gzip_bytes(text.encode()))
    manifest = {
        **log.manifest,
        "schema": SCHEMA,
        "label": log.label,
        "run": log.run,
        "arms": list(log.arms),
        "path_arm": log.path_arm,
        "draft_len": log.draft_len,
        **(manifest_extra or {}),
        "files": [file_entry(folder / n) for n in names],
    }
    write_bytes_atomically(folder / "manifest.json", json.dumps(manifest, indent=1, allow_nan=False).encode() + b"\n")
    return folder


def _refuse_existing(path: Path) -> None:
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise LogError(f"{path}: exists already and was left alone; name a new place or remove it first")


def convert(source: str | Path | Iterable[str | Path], target: str | Path) -> Path:
    """Copy a log into another form: a .jsonl or .jsonl.gz file, else a run folder; several sources are merged."""
    log, target = read_log(source), Path(target)
    if not re.search(r"\.jsonl(\.gz)?$", target.name):
        return write_log(target, log)
    _refuse_existing(target)
    data = b"".join(encode_row(row) for w in range(len(log.workloads)) for row in log_rows(log, w))
    write_bytes_atomically(target, gzip_bytes(data) if target.suffix == ".gz" else data)
    return target


# ---- summary


def summary(log: PositionLog) -> dict:
    """What ``specsel log summary --json`` prints: counts, and per workload and arm the two means (ratios of sums).

    Means are over the blocks of an arm that always runs; on a block-anchored log the accepted means are over the
    logged blocks and block efficiency is None, because no arm but the logged one could be replayed.
    """
    views = [block_view(log, k if log.complete else None) for k in range(log.n_arms)]
    accepted = [[v.accepted[v.workload_of == w, k] for k, v in enumerate(views)] for w in range(len(log.workloads))]
    emitted = [[v.emitted[v.workload_of == w, k] for k, v in enumerate(views)] for w in range(len(log.workloads))]

    def means(values: list[list[np.ndarray]]) -> dict:
        return {
            w: {a: float(x.sum() / len(x)) if len(x) else None for a, x in zip(log.arms, row, strict=False)}
            for w, row in zip(log.workloads, values, strict=False)
        }

    table = log.request_table
    counts = (
        np.bincount(log.workload, minlength=len(log.workloads))
        if table is None
        else table["workload"].value_counts().reindex(log.workloads, fill_value=0)
    )
    rows = np.bincount(log.workload, weights=np.diff(log.starts), minlength=len(log.workloads))
    efficiency = means(emitted) if log.complete else {w: dict.fromkeys(log.arms) for w in log.workloads}
    return {
        "run": log.run,
        "label": log.label,
        "arms": list(log.arms),
        "draft_len": log.draft_len,
        "requests": {w: int(n) for w, n in zip(log.workloads, counts, strict=False)},
        "positions": {w: int(n) for w, n in zip(log.workloads, rows, strict=False)},
        "mean_accepted": means(accepted),
        "block_efficiency": efficiency,
    }


def drafter_sha256(folder: Path) -> str:
    """Hash of a drafter's folder as a manifest states it: over the hashes of its weight and configuration files, by
    name; what tells of its training does not count."""
    told = ("training.json", "checkpoint.json")
    files = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".json") and p.name not in told]
    return sha256_of("".join(sha256_of(p.read_bytes()) for p in sorted(files)).encode())
