"""Other people's logs as run folders of ours. Row-by-row results of an import stay on the user's machine.

SpecDecode-Bench/simulator (arXiv 2601.11580): per request, for every output position p, the tokens emitted by a block
that starts there, for an n-gram proposer and for EAGLE, both with up to 20 drafted tokens. The first output token is
included, so that ``remaining`` is T - p, and ``accepted`` is the value minus 1 (the bonus). Drafted counts and
confidences are not in these files.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

from specsel.logs.files import LogError, read_text, sha256_of
from specsel.logs.log import PositionLog
from specsel.logs.read import LogWarning
from specsel.logs.schema import STATS
from specsel.logs.write import write_log

ARMS, DRAFT_LEN, LONGEST_MATCH = ("ngram", "eagle"), 20, 6


def match_lengths(tokens: np.ndarray, longest: int = LONGEST_MATCH) -> np.ndarray:
    """For every prefix tokens[:i], i = 0..len(tokens): its longest suffix (0..longest) that also occurs earlier in it.

    Source: ``policies.md``, section 7 (the free feature of the gates).

    >>> match_lengths(np.array([7, 8, 7, 8, 9]))
    array([0, 0, 0, 1, 2, 0])
    """
    tokens = np.asarray(tokens)
    found = np.zeros(len(tokens) + 1, dtype=int)
    code = np.zeros(len(tokens) + 1, dtype=np.int64)  # of the n-gram that ends before i, numbered anew for each n
    ids = np.unique(tokens, return_inverse=True)[1]
    for n in range(1, min(longest, len(tokens)) + 1):
        pairs = code[n - 1 : -1] * (len(tokens) + 1) + ids[n - 1 :]
        _, first, code[n:] = np.unique(pairs, return_index=True, return_inverse=True)
        found[n:][first[code[n:]] < np.arange(len(pairs))] = n
    return found


def import_specdecode_bench(path: str | Path, out: str | Path) -> Path:
    """Turn a folder of SpecDecode-Bench/simulator files (or one file) into the run folder ``out``.

    Workload = file name without ``combined_``; request = workload and line, so that requests keep the file's order;
    the request table holds the source's id, prompt length and hash, and whether the prompt begins with one token twice.
    """
    return write_log(out, read_specdecode_bench(path))


def read_specdecode_bench(path: str | Path) -> PositionLog:
    """The same as a log in memory, with the suffix match length (0..6) as context."""
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise LogError(
            f"{path}: holds no .jsonl files; expected combined_<workload>.jsonl of SpecDecode-Bench/simulator"
        )
    emitted, matched, rows = zip(*(request for file in files for request in _read_file(file)), strict=True)
    table = pd.DataFrame(rows)
    if doubled := table["doubled_begin"].sum():
        cause = "most likely a begin token of the template and one of the tokenizer"
        effect = "acceptance may be lower than after a well-formed prompt"
        told = f"{path}: {doubled:,} of {len(rows):,} prompts begin with one token twice, {cause}: {effect}"
        warnings.warn(told, LogWarning, stacklevel=2)
    lengths = np.array([len(of_request) for of_request in emitted])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    remaining = np.repeat(lengths, lengths) - position
    accepted = np.minimum(np.concatenate(emitted) - 1, remaining[:, None]).astype(np.int16)
    workload, workloads = pd.factorize(table["workload"])
    log = PositionLog(
        ARMS,
        DRAFT_LEN,
        tuple(workloads),
        tuple(table["request"]),
        workload=workload,
        starts=starts,
        proposed=np.full_like(accepted, DRAFT_LEN),
        accepted=accepted,
        on_path=np.zeros(len(position), dtype=bool),
        position=position.astype(np.int32),
        remaining=remaining.astype(np.int32),
        context={"match_length": np.concatenate(matched).astype(float)},
        stats={n: np.full(accepted.shape, np.nan) for n in (*STATS, "match_length")},
        run="specdecode-bench",
        label="MEASURED",
        path_arm=ARMS[0],
        request_table=table,
        manifest={"source": "SpecDecode-Bench/simulator", "proposed": "not in the source; the cap is written"},
    )
    return log.with_path()


def _read_file(file: Path) -> list[tuple[np.ndarray, np.ndarray, dict]]:
    """(emitted (T, 2), match length (T,), request row) of every request of a file that has a position."""
    rows, workload = [], file.stem.removeprefix("combined_")
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            arrays = [_counts(record[f"acc_{arm}"]["acc_len"]) for arm in ARMS]
            prompt, output = (np.asarray(record[f"{part}_token_ids"]) for part in ("prompt", "generated"))
            length = min(*map(len, arrays), len(output))
            tokens = np.concatenate([prompt, output[:length]]).astype(np.int64)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise LogError(
                f"{file}, line {number}: is no record of SpecDecode-Bench/simulator ({error!r}); expected "
                "prompt_token_ids, generated_token_ids and acc_<arm>.acc_len with whole numbers 1..21"
            ) from None
        if not length:
            continue
        row = {
            "workload": workload,
            "request": f"{workload}/{number - 1}",
            "source_id": str(record.get("id")),
            "prompt_tokens": len(prompt),
            "output_tokens": length,
            "prompt_sha256": sha256_of(prompt.astype("<i8").tobytes()),
            "doubled_begin": len(prompt) > 1 and bool(prompt[0] == prompt[1]),
        }
        matched = match_lengths(tokens)[len(prompt) + 1 :]  # the anchor, output[p], is committed
        rows.append((np.stack([a[:length] for a in arrays], axis=1), matched, row))
    return rows


def _counts(values: list) -> np.ndarray:
    counts = np.asarray(values)
    if counts.size and (counts.dtype.kind != "i" or counts.min() < 1 or counts.max() > DRAFT_LEN + 1):
        raise ValueError("acc_len outside 1..21")
    return counts.astype(np.int64)
