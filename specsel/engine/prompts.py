"""Prompts: read from a local folder, checked against the hashes of the published files, or rebuilt from the public hub
data sets at pinned revisions, checked text by text against ``data/prompts/index.jsonl.gz``; never stored in the
repository."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from specsel.logs import SpecselError, sha256_of

WORKLOADS = ("gsm8k", "code", "chat", "copy")
SHA256 = {
    "gsm8k.eval": "36f35feb4862cbb0815c5e70df035f699f9ecb3a39b1afb9ed13c818cb4c115e",
    "gsm8k.train": "42db57da95f9e516c521ced9b056e9738bcec64434f0651e4b3a905870ca1774",
    "code.eval": "09137bd099776e057aca043c0c29b45a0a4f01eae59d98a2c21f1a6f969c8c26",
    "code.train": "3600b557e7bfb161813d5c0bacd212ec6794d96c6978d3bf1c6bcef4d77e5abc",
    "chat.eval": "6c34be39fa0d11672934e3c1a396b9e050077ef99ee5d844c739bf2de051e396",
    "chat.train": "f832f80b1fa7e967300900b9218332ce2c960b377dc449d487ae925572dde3cc",
    "copy.eval": "02c53ebf15d27261da14c50149e28ce2cd9f659fc1dffd7871836d559bde1966",
    "copy.train": "18e565e2214018672850624a70e3fa5dd41f3d952aad3c6dd377e325377f1ca3",
}


INDEX = Path(__file__).parents[2] / "data" / "prompts" / "index.jsonl.gz"
HUB = Path("hub")
"""Given instead of a folder: evaluation prompts from the public hub data sets."""


class PromptError(SpecselError):
    """The prompt files are missing or are not the published ones."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: ``id`` is unique in its ``workload``; ``category`` may be empty."""

    id: str
    workload: str
    messages: tuple[dict[str, str], ...]
    category: str = ""

    @property
    def key(self) -> str:
        """Name of the request, and of its noise stream when sampling."""
        return f"{self.workload}/{self.id}"

    @property
    def sha256(self) -> str:
        """Hash over the messages; the log carries this instead of the text."""
        return sha256_of(json.dumps(self.messages, sort_keys=True).encode())


def default_folder() -> Path:
    """Folder of the prompt files: the environment variable SPECSEL_PROMPTS, else ``data/prompts``."""
    return Path(os.environ.get("SPECSEL_PROMPTS", "data/prompts"))


def prompt_file(workload: str, split: str, folder: Path | None = None) -> Path:
    """Path of one prompt file."""
    return (folder or default_folder()) / f"{workload}.{split}.jsonl"


def prompts_sha256(workload: str, split: str, folder: Path | None = None) -> str:
    """Sha256 of the prompt file; of the published one when prompts come from the hub, where every text is checked by
    itself."""
    if folder == HUB:
        return SHA256[f"{workload}.{split}"]
    return sha256_of(prompt_file(workload, split, folder))


def workloads_in(folder: Path | None) -> tuple[str, ...]:
    """The workloads of a folder, one for each <workload>.eval.jsonl: the published ones first, then by name.

    Raises PromptError where there is none.
    """
    if folder == HUB:
        return WORKLOADS
    where = folder or default_folder()
    found = {path.name.removesuffix(".eval.jsonl") for path in where.glob("*.eval.jsonl")}
    if not found:
        raise PromptError(
            f"{where}: no prompt file <workload>.eval.jsonl. Give the folder of the prompt files with --prompts or "
            "SPECSEL_PROMPTS."
        )
    return (*(w for w in WORKLOADS if w in found), *sorted(found - set(WORKLOADS)))


def load_prompts(workload: str, split: str, folder: Path | None = None, *, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of ``<workload>.<split>.jsonl`` (all when None), in file order.

    A line is a JSON object with id (text, once in a file), messages (a list of {role, content}) and, optionally,
    category. Raises PromptError when the file is missing or a line is not such an object, and when it has the name of a
    published file and is not that file.
    """
    if folder == HUB:
        return load_from_hub(workload, limit=limit)
    path = prompt_file(workload, split, folder)
    if not path.is_file():
        raise PromptError(
            f"{path}: no such prompt file. Give the folder of the prompt files with --prompts or SPECSEL_PROMPTS."
        )
    data, expected = path.read_bytes(), SHA256.get(f"{workload}.{split}")
    if expected and (found := sha256_of(data)) != expected:
        raise PromptError(
            f"{path}: sha256 is {found[:12]}..., the published file has {expected[:12]}...; fetch the file again, or "
            "give prompts of your own another name."
        )
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), start=1):
        if line.strip():
            prompt = _prompt(line, workload, f"{path}, line {number}")
            if prompt.id in prompts:
                raise PromptError(f"{path}, line {number}: field 'id' {prompt.id!r} is there twice; ids are unique.")
            prompts[prompt.id] = prompt
    return list(prompts.values())[:limit]


def _prompt(line: str, workload: str, where: str) -> Prompt:
    """One line of a prompt file; PromptError names what is wrong with it."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: is not JSON ({error}).") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not row["id"]:
        raise PromptError(f"{where}: field 'id' must be text; give every prompt an id of its own.")
    said = [
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages or ()
    ]
    if not isinstance(messages, list) or not said or not all(said):
        raise PromptError(f"{where}: field 'messages' must be a list of objects with role and content.")
    return Prompt(row["id"], workload, tuple(messages), row.get("category") or "")


def tidy(text: str) -> str:
    """White space as in the published prompts: plain spaces, no trailing blanks, no carriage returns."""
    lines = text.replace("\u00a0", " ").replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def gsm8k(number: int, row: dict) -> tuple[str, str, str]:
    """The question as it stands, with plain spaces."""
    return f"gsm8k/test/{number}", tidy(row["question"]), ""


def human_eval(number: int, row: dict) -> tuple[str, str, str]:
    """The signature and docstring in a Python fence under a one-line instruction."""
    function = f"```python\n{tidy(row['prompt'])}\n```"
    text = f"Complete the following Python function. Return the full function.\n\n{function}"
    return f"humaneval/test/{number}", text, ""


def mbpp(number: int, row: dict) -> tuple[str, str, str]:
    """The task and its tests in the wording of the MBPP paper."""
    tests = "\n".join(row["test_list"])
    task = f"You are an expert Python programmer, and here is your task: {row['text'].strip()}"
    text = f"{task} Your code should pass these tests:\n\n{tests}"
    return f"mbpp/test/{row['task_id']}", tidy(text), "natural-language"


SOURCES = {  # data set of the hub, its configuration and revision, and how a row becomes (prompt id, text, category)
    "gsm8k": (("openai/gsm8k", "main", "740312add88f781978c0658806c59bc2815b9866", gsm8k),),
    "code": (
        ("openai/openai_humaneval", "openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544", human_eval),
        ("google-research-datasets/mbpp", "full", "4bb6404fdc6cacfda99d4ac4205087b89d32030c", mbpp),
    ),
}
"""Only the sources that the hub carries unchanged; the other prompts come from the local files."""


def index(workload: str) -> dict[str, str]:
    """Prompt id -> sha256 of its messages, in file order, for one workload's evaluation prompts."""
    with gzip.open(INDEX, "rt", encoding="utf-8") as handle:
        rows = map(json.loads, handle)
        return {row["id"]: row["sha256"] for row in rows if row["workload"] == workload}


def load_from_hub(workload: str, *, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` evaluation prompts of a workload, rebuilt from the hub; every text is checked against its
    published hash.

    Raises PromptError for a workload that the hub does not carry, a missing library, or a text that differs.
    """
    if workload not in SOURCES:
        raise PromptError(
            f"the prompts of '{workload}' are not on the hub; "
            f"take {workload}.eval.jsonl and name its folder with --prompts."
        )
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise PromptError("reading prompts from the hub needs the library 'datasets': pip install datasets.") from error
    rows = (
        build(number, row)
        for name, part, revision, build in SOURCES[workload]
        for number, row in enumerate(load_dataset(name, part, split="test", revision=revision))
    )
    return check({row[0]: row for row in rows}, workload, limit)


def check(built: dict[str, tuple[str, str, str]], workload: str, limit: int | None) -> list[Prompt]:
    """Prompts in published order from rebuilt (id, text, category); PromptError names the first that is missing or
    differs."""
    prompts = []
    for id_, expected in list(index(workload).items())[:limit]:
        if id_ not in built:
            raise PromptError(f"{workload}: prompt {id_} is not in the hub data set at its pinned revision.")
        _, text, category = built[id_]
        prompt = Prompt(id_, workload, ({"role": "user", "content": text},), category)
        if prompt.sha256 != expected:
            raise PromptError(
                f"{workload}: prompt {id_} differs from the published one "
                f"(sha256 {prompt.sha256[:12]}..., expected {expected[:12]}...)."
            )
        prompts.append(prompt)
    return prompts


def encode(tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt under the target's own chat template: the one prompt builder of training and evaluation.
    Warns when they begin with the begin token twice, which drafters have not seen in training."""
    ids = list(tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False))
    if len(ids) > 1 and ids[0] == ids[1] == getattr(tokenizer, "bos_token_id", None):
        warnings.warn(
            f"prompts begin with the begin token ({ids[0]}) twice, the template's and the prompt's own: acceptance "
            "may be lower after such a prompt. Take one of them away.",
            stacklevel=2,
        )
    return ids
