"""What a chapter opens with: its parameters checked, its log read, its ledger started.

A chapter is a notebook, and its parameters come from its own cell, from papermill's command line (where a list arrives
as text) or from a reader who edits the cell. Whatever is wrong with one is said in one sentence before anything runs.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from specsel.costs import Costs, load_costs
from specsel.logs import CONTEXT, STATS, PositionLog, SpecselError, located, read_log
from specsel.paper import charts
from specsel.paper.ledger import Ledger, open_ledger
from specsel.paper.notebooks import notebook_parameters
from specsel.stats import Resampling


class ParameterError(SpecselError):
    """A parameter of a chapter that has an unknown name or a value that it cannot have."""


def _different(items: list) -> list:
    if len(set(items)) < len(items):
        raise ValueError("items should be different")
    return items


Count, Seed = Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]
Share, Inside = Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(gt=0, lt=1)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Several = (Field(min_length=1), AfterValidator(_different))


class Parameters(BaseModel):
    """Every parameter that a chapter can have; None where it may be left to the log."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: Name = "data/runs/campaign"  # folder of the log
    arms: Annotated[list[Name], *Several] | None = None  # arms of the pool; None: all of the log
    workloads: Annotated[list[Name], *Several] | None = None  # None: all of the log
    draft_len: Count | None = None  # cap on drafted tokens per block; None: that of the log
    level: Inside = 0.95  # nominal coverage of every interval
    n_resamples: Count = 10_000
    seed: Seed = 7
    threshold: Share | None = None  # probability from which a block is redrafted; None: chosen without the held-out one
    thresholds: Annotated[list[Share], *Several] | None = None  # probabilities to choose from
    features: Annotated[list[Literal[*STATS, *CONTEXT]], *Several] | None = None  # what the selector reads
    rho: Price = 0.1  # price of a draft, in verifications
    alpha: Price = 0.0  # price of each further verification of a redraft, in verifications
    train_share: Inside = 0.5  # share of the requests that policies are tuned on
    seeds: Count = 20  # repetitions of policies that draw
    policy_resamples: Count = 20_000
    tuned: bool = True
    low_precision: Name = "_bf16*"  # ending of runs beside this one, here and below
    sampled: Name = "_t*"
    sweep: Name = "_sweep_*"
    coverage_study: Name = "data/studies/coverage.json"
    reported: Name = "data/reported/original_study.csv"
    drafters: Name = "data/drafters"

    @field_validator("*", mode="before")
    @classmethod
    def parsed(cls, value: object, info: ValidationInfo) -> object:
        """Numbers, lists and words of the command line of papermill, which passes them as text."""
        kind = str(cls.model_fields[info.field_name].annotation)
        if isinstance(value, str) and "str" not in kind and "list" not in kind:
            return _json(value)
        if "list" in kind and isinstance(value, str):
            found = _json(value)
            return [_json(part.strip()) for part in value.split(",")] if isinstance(found, str) else found
        return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _json(text: str) -> object:
    """What a text says as JSON (or as Python writes None, True, False), else the text."""
    words = {"None": None, "True": True, "False": False}
    with contextlib.suppress(ValueError):
        return words[text] if text in words else json.loads(text)
    return text


@dataclass(frozen=True)
class Chapter:
    """What the cells of a chapter use; a parameter is an attribute, as in ``chapter.threshold``."""

    name: str
    parameters: Parameters
    run: Path  # folder of the log, found from wherever the notebook runs
    log: PositionLog  # only the arms, workloads and draft length that were asked for
    resampling: Resampling  # the one of every interval of the chapter
    ledger: Ledger
    costs: Costs | None  # None where the run was not timed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.parameters, name)


def open_chapter(name: str, names: Mapping[str, Any]) -> Chapter:
    """Check the parameters among `names` (the notebook's globals), read the log, start the ledger, set up the charts.

    Raises ParameterError for a name that the notebook's parameters cell does not have and for a value that its
    parameter cannot take, LogError for a log that cannot be read. A notebook shows either as one sentence.
    """
    try:
        return _open(name, names)
    except SpecselError as error:
        sentence = f"{type(error).__name__}: {error}"
        error._render_traceback_ = lambda: [sentence]  # how IPython asks an exception for its own look
        raise


def _open(name: str, names: Mapping[str, Any]) -> Chapter:
    charts.use()
    p = checked(given(name, names))
    run = located(p.run)
    log = read_log(run)
    _known("arms", p.arms, log.arms)
    _known("workloads", p.workloads, log.workloads)
    if p.draft_len and p.draft_len > log.draft_len:
        raise ParameterError(f"parameter 'draft_len' is {p.draft_len}; expected at most {log.draft_len}, as logged")
    log = log.pool(p.arms) if p.arms else log
    log = log.only(p.workloads) if p.workloads else log
    log = log.cap(p.draft_len) if p.draft_len else log
    resampling = Resampling(p.n_resamples, p.level, p.seed)
    ledger = open_ledger(name, run=log.run, log_sha256=log.sha256, label=log.label)
    return Chapter(name, p, run, log, resampling, ledger, load_costs(run))


_opened: set[str] = set()  # chapters that this kernel has opened: afterwards its names are results, not parameters


def given(name: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters among a notebook's names; ParameterError for one that its parameters cell does not declare."""
    path = located(f"notebooks/{name}.ipynb")
    known = notebook_parameters(path) if path.is_file() else Parameters.model_fields
    if name not in _opened:
        foreign = [n for n, value in names.items() if n not in known and _like_a_parameter(n, value)]
        if foreign:
            near = difflib.get_close_matches(foreign[0], known, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ParameterError(f"'{foreign[0]}' is no parameter of {name}; {hint}Known: {', '.join(known)}")
        _opened.add(name)
    return {n: names[n] for n in known if n in names}


def _like_a_parameter(name: str, value: object) -> bool:
    """Could papermill have put it there? Not what IPython, imports and definitions leave behind."""
    own = name.startswith("_") or name in ("In", "Out", "exit", "quit", "get_ipython", "open")
    return not own and isinstance(value, (str, float, int, list, dict, type(None)))


def checked(values: Mapping[str, Any]) -> Parameters:
    """The values as parameters; ParameterError names the first wrong one, what came, and what is allowed.

    >>> checked({"arms": '["a", "b"]', "level": "0.9"}).arms
    ['a', 'b']
    """
    try:
        return Parameters(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name, allowed = str(first["loc"][0]), first["msg"].removeprefix("Value error, ")
        raise ParameterError(f"parameter '{name}' is {values[name]!r}: {allowed[0].lower()}{allowed[1:]}") from None


def _known(parameter: str, asked: Sequence[str] | None, there: Sequence[str]) -> None:
    missing = [item for item in asked or () if item not in there]
    if missing:
        raise ParameterError(f"parameter '{parameter}' names {missing[0]!r}; the log has {', '.join(there)}")
