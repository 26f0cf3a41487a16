"""What a manifest says of where a run came from: target, drafters, prompts, versions, hardware, commit, time."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specsel import logs
from specsel.engine.prompts import SHA256, Prompt, encode, prompts_sha256
from specsel.engine.target import Target


def settings_of(target: Target, config: Any, drafters: dict) -> dict:
    """Everything in a manifest but the log itself; ``config`` is a `harness.CollectConfig`."""
    prompts, mode = config.by_workload(), "sampled" if config.temperature else "greedy"
    template = logs.sha256_of((target.tokenizer.chat_template or "").encode())
    versions = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "draft_len": config.draft_len,
        "max_new_tokens": config.max_new,
        "decoding": {"mode": mode, "temperature": config.temperature, "seed": config.seed},
        "dtype": target.dtype,
        "target": {"name": target.name, "sha256": target.sha256, "chat_template_sha256": template},
        "drafters": drafters,
        "versions": versions | {"python": platform.python_version()},
        "hardware": hardware(torch.cuda.is_available()),
        "prompts": {
            w: {
                "file": f"{w}.eval.jsonl",
                "sha256": prompts_sha256(w, "eval", config.prompts),
                "count": len(found),
                "published": f"{w}.eval" in SHA256,
            }
            for w, found in prompts.items()
        },
        "first_prompt": _first_prompt(target.tokenizer, [p for found in prompts.values() for p in found]),
        "git_commit": git_commit(),
    }


def _first_prompt(tokenizer, prompts: list[Prompt]) -> dict:
    """The outermost token ids of the run's first prompt and the hash of the tokenizer that made them: two runs that
    differ there have had different prompts."""
    ids = encode(tokenizer, prompts[0]) if prompts else []
    made_by = getattr(tokenizer, "backend_tokenizer", None)
    digest = logs.sha256_of(made_by.to_str().encode()) if made_by else None
    return {"first_ids": ids[:8], "last_ids": ids[-8:], "tokenizer_sha256": digest}


def hardware(cuda: bool) -> dict:
    """Processor, card (None where ``cuda`` says that none is in use) and threads."""
    gpu = torch.cuda.get_device_name() if cuda else None
    return {"cpu": cpu_name(), "gpu": gpu, "threads": torch.get_num_threads()}


def cpu_name() -> str:
    """Model name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def git_commit() -> str | None:
    """Commit of the working tree that ran, None outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or None


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
