"""The commands that need the engine: options in, one call of `specsel.engine` each; torch is imported when a command
runs.

Defaults live in the engine's configuration records: an option that is not given is not passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from specsel.logs import read_log
from specsel.stats import Resampling
from specsel.study.drafters import repetition, still_rising

Count = {"min": 1}
Folder = {"exists": True, "file_okay": False}

Target = Annotated[str | None, typer.Option(help="embedded target (default), a folder, or a hub model")]
Revision = Annotated[str | None, typer.Option(help="pinned revision of a hub model")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps")]
TrainDevice = Annotated[str | None, typer.Option(help="cpu, cuda, mps (default: cuda where there is one, else cpu)")]
Dtype = Annotated[
    str, typer.Option(help="precision of the target; equality with plain decoding is claimed for float32 only")
]
Eagle = Annotated[Path | None, typer.Option(help="EAGLE-3 head: a folder, or a hub repository owner/name@revision")]
Dflash = Annotated[Path | None, typer.Option(help="DFlash drafter: a folder, or a hub repository")]
Drafter = Annotated[list[str] | None, typer.Option(help="NAME=FOLDER: weights of a drafter; may be repeated")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="folder of <workload>.eval.jsonl files (default: $SPECSEL_PROMPTS, else data/prompts)"),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="folder to write; an interrupted run is resumed")]


def add_engine_commands(app: typer.Typer) -> None:
    """Add fetch, train, collect, time and race to the command line."""
    train = typer.Typer(
        help="Training data and drafters.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )
    train.command("data")(train_data)
    train.command("overlap")(train_overlap)
    train.command("eagle")(_trainer("eagle", "EAGLE-3 head"))
    train.command("dflash")(_trainer("dflash", "block-diffusion drafter"))
    app.add_typer(train, name="train")
    for name, command in (("fetch", fetch), ("collect", collect), ("time", time_command), ("race", race)):
        app.command(name)(command)


def fetch() -> None:
    """Make the embedded target ready: download once, check its hash, convert.

    Example: specsel fetch
    """
    from specsel import engine

    print(engine.fetch())


def train_data(
    out: Out = Path("_build/train"),
    tokens: Annotated[int, typer.Option(help="output tokens to keep; loops do not count", **Count)] = 850_000,
    prompts: Prompts = None,
    target: Target = None,
    revision: Revision = None,
    device: TrainDevice = None,
    dtype: Annotated[str | None, typer.Option(help="precision of generation (default: the faster one)")] = None,
) -> None:
    """Let the target answer the training prompts: what drafters are trained on.

    Example: specsel train data --tokens 850000 --out _build/train
    """
    from specsel import engine

    loaded = _target(target, revision, device or engine.best_device(), "float32")
    print(engine.build(loaded, out, tokens=tokens, prompts=prompts, dtype=dtype))


def train_overlap(
    out: Annotated[Path, typer.Option("--out", "-o", help="file to write")] = Path("data/drafters/overlap.json"),
    prompts: Prompts = None,
) -> None:
    """Count the evaluation prompts that stand among the training prompts, exactly or nearly.

    Example: specsel train overlap
    """
    from specsel import engine

    print(engine.write_overlap(out, prompts))


def _trainer(kind: str, what: str) -> Callable[..., None]:
    """The command that trains one kind of drafter."""

    def command(
        data: Annotated[Path, typer.Option(help="folder of training data")] = Path("_build/train"),
        out: Out = Path(f"_build/drafters/{kind}"),
        steps: Annotated[int | None, typer.Option(help="training steps", **Count)] = None,
        seed: Annotated[int | None, typer.Option()] = None,
        resume: Annotated[
            Path | None,
            typer.Option(help="drafter folder whose trainings are repeated; they continue in --out", **Folder),
        ] = None,
        after: Annotated[
            Path | None, typer.Option(help="drafter folder to go on from: train it further", **Folder)
        ] = None,
        target: Target = None,
        revision: Revision = None,
        device: TrainDevice = None,
        dtype: Dtype = "float32",
    ) -> None:
        from specsel import engine

        if resume and after:
            raise typer.BadParameter("--resume repeats the trainings of a folder, --after trains it further: give one.")
        engine.flush_tiny_numbers()
        loaded = _target(target, revision, device or engine.best_device(), dtype)
        changes = _given(steps=steps, seed=seed)
        if resume:
            told = engine.training_log(kind, resume)
            engine.repeat_training(kind, loaded, data, out, told, report=_tell, **changes)
        else:
            recipe = engine.recipe(kind, further=after is not None, **changes)
            engine.train_drafter(kind, loaded, data, out, recipe, after=after, report=_tell)
        how = Resampling(2_000, seed=0)
        print(repetition(resume, out, resampling=how) if resume else still_rising(out, resampling=how))

    command.__doc__ = f"""Train the {what} on the target's own answers; a stopped training goes on where it was.

    Example: specsel train {kind} --data _build/train
    """
    return command


def _tell(point: dict[str, Any]) -> None:
    """One line of progress of a training."""
    print(
        f"step {point['step']:,}: {point['block_efficiency']:.3f} tokens per block, first token "
        f"{point['first_token']:.1%}, loss {point['loss']:.2f}, after {point['seconds'] / 60:.0f} min",
        flush=True,
    )


def collect(
    out: Out,
    requests: Annotated[int | None, typer.Option(help="prompts per workload", **Count)] = None,
    max_new: Annotated[int | None, typer.Option(help="output tokens, at most", min=2)] = None,
    draft_len: Annotated[int | None, typer.Option(help="cap on drafted tokens per block", **Count)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy", min=0.0)] = None,
    seed: Annotated[int | None, typer.Option(help="of the noise streams when temperature > 0")] = None,
    prompts: Prompts = None,
    eagle: Eagle = None,
    dflash: Dflash = None,
    drafter: Drafter = None,
    tag: Annotated[str | None, typer.Option(help="name of the drafters' checkpoints in the manifest")] = None,
    executor: Annotated[str, typer.Option(help="local, or ray: the same files from several processes")] = "local",
    workers: Annotated[int | None, typer.Option(help="Ray actors", **Count)] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(help="afterwards decode with this fixed arm, or all, and compare every block; may be repeated"),
    ] = None,
    check_requests: Annotated[
        int | None, typer.Option(help="requests per workload to check (default: all)", **Count)
    ] = None,
    target: Target = None,
    revision: Revision = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Collect a run folder: what every arm would have had accepted at every position of the target's own output.

    Example: specsel collect --requests 32 --out data/runs/mine
    """
    from specsel import engine

    config = engine.CollectConfig(
        **_given(
            requests=requests, max_new=max_new, draft_len=draft_len, temperature=temperature, seed=seed, prompts=prompts
        )
    )
    pool = _weights(drafter, eagle=eagle, dflash=dflash)
    loaded, drafters = engine.load_pool(_target(target, revision, device, dtype), pool)
    if unknown := set(check or ()) - {"all", *drafters}:
        raise typer.BadParameter(f"--check {min(unknown)}: no arm; choose all or one of {', '.join(drafters)}.")
    options = {"drafters": engine.describe(pool, tag), "executor": executor} | _given(workers=workers)
    print(engine.collect(loaded, drafters, out, config, **options))
    if check:
        arms = () if "all" in check else tuple(check)
        options = {"arms": arms, "per_workload": check_requests, "prompts": prompts}
        print(engine.check_engine(engine.Features(loaded), drafters, out, **options))


def time_command(
    run: Annotated[Path, typer.Argument(help="run folder; timings.json is written there", **Folder)],
    samples: Annotated[int | None, typer.Option(help="timed calls of each", **Count)] = None,
    eagle: Eagle = None,
    dflash: Dflash = None,
    drafter: Drafter = None,
    target: Target = None,
    revision: Revision = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Time drafts, verifications and cache catch-up on this machine: the raw samples behind rho and alpha.

    Example: specsel time data/runs/campaign
    """
    from specsel import engine

    config = _weights(drafter, eagle=eagle, dflash=dflash)
    loaded, pool = engine.load_pool(_target(target, revision, device, dtype), config)
    print(
        engine.write_timings(
            run, engine.measure(engine.Features(loaded), pool, engine.TimingConfig(**_given(samples=samples)))
        )
    )


def race(
    run: Annotated[Path, typer.Argument(help="run folder whose requests are decoded again", **Folder)],
    policy: Annotated[list[str] | None, typer.Option(help="policy to race; may be repeated")] = None,
    selector: Annotated[Path | None, typer.Option(help="selector.json: race this redraft selector as well")] = None,
    requests: Annotated[int | None, typer.Option(help="requests per workload", **Count)] = None,
    prompts: Prompts = None,
    eagle: Eagle = None,
    dflash: Dflash = None,
    drafter: Drafter = None,
    target: Target = None,
    revision: Revision = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Decode with policies in real time, plain decoding among them, and compare tokens and wall clock.

    Example: specsel race data/runs/campaign --policy fixed:dflash --policy union --requests 4
    """
    from specsel import engine

    config = _weights(drafter, eagle=eagle, dflash=dflash)
    loaded, pool = engine.load_pool(_target(target, revision, device, dtype), config)
    engine.check_loaded(read_log(run), loaded, engine.describe(config))
    print(
        engine.race(
            engine.Features(loaded),
            pool,
            run,
            policies=tuple(policy or ()),
            **_given(per_workload=requests, prompts=prompts, selector=selector),
        )
    )


def _weights(pairs: list[str] | None, **named: Path | None) -> dict[str, Any]:
    """Weights by drafter, from options of their own and from NAME=FOLDER."""
    if wrong := [pair for pair in pairs or () if "=" not in pair]:
        raise typer.BadParameter(f"--drafter {wrong[0]}: expected NAME=FOLDER.")
    return _given(**named) | dict(pair.split("=", 1) for pair in pairs or ())


def _target(name: str | None, revision: str | None, device: str, dtype: str) -> Any:
    from specsel import engine

    return engine.load_target(**_given(name=name, revision=revision), device=device, dtype=dtype)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}
