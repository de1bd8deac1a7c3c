"""`gshard evaluate`: BLEU and chrF++ of a run on held-out text, compared with its controls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from gshard.commands import options, show
from gshard.commands.options import Run as RunFolder
from gshard.commands.show import console, say

if TYPE_CHECKING:
    from gshard.mt.evaluation.baselines import BaselineModels
    from gshard.mt.evaluation.evaluate import EvaluateConfig
    from gshard.mt.evaluation.systems import Systems
    from gshard.mt.progress import Progress
    from gshard.mt.run import Run

_SCORES = {  # as results call them, and as tables do
    "bleu": "BLEU", "spbleu": "spBLEU", "chrf": "chrF++", "copy_bleu": "copy",
    "nearest_bleu": "nearest", "untrained_bleu": "untrained",
}  # fmt: skip


_Sentences = Annotated[int, typer.Option(help="sentences of each language, at most; 0 means all")]
_Untrained = Annotated[
    bool, typer.Option("--untrained", help="score the run's initial weights too")
]
_Baselines = Annotated[
    bool, typer.Option("--baselines", help="train and score a bilingual model for each task")
]
_Weights = Annotated[
    str, typer.Option(help="score with int8 or float32 weights too", show_default="as saved")
]
_Steps = Annotated[int, typer.Option(help="training steps of each bilingual model, at most")]


def evaluate(
    run: RunFolder,
    split: Annotated[str, typer.Option(help="test, dev or train")] = "test",
    languages: options.Languages = "",
    sentences: _Sentences = 0,
    beam: options.Beam = 4,
    alpha: options.Alpha = 0.6,
    checkpoint: options.Checkpoint = "best",
    untrained: _Untrained = False,
    baselines: _Baselines = False,
    baseline_steps: _Steps = 4_000,
    examples: Annotated[int, typer.Option(help="examples of each task for the report")] = 3,
    devices: options.Devices = 0,
    engine: options.Engine = "auto",
    weights: _Weights = "",
    threads: options.Threads = 0,
    as_json: options.Json = False,
    coordinator: options.Coordinator = "",
    processes: options.Processes = None,
    process: options.Process = None,
) -> None:
    """Score a run with BLEU and chrF++. Safe to interrupt; run it again to continue."""
    from gshard.mt import hosts
    from gshard.mt.broadcast import Broadcast
    from gshard.mt.decoding.engines import engine_of
    from gshard.mt.evaluation import evaluate as work
    from gshard.mt.evaluation.systems import Systems
    from gshard.mt.launch.status import reporting
    from gshard.mt.progress import SILENT
    from gshard.mt.run import Run

    opened = Run.open(run)
    chosen = tuple(name for name in languages.replace(" ", "").split(",") if name)
    using, search = engine_of(engine, weights, threads), (beam, alpha, checkpoint)
    config = work.EvaluateConfig(split, chosen, sentences, *search, untrained, examples)
    share_of(opened, config, 0, 1)  # report misspelt names before the weights are read
    which = options.members(coordinator, processes, process)
    steps = baseline_steps if baselines else 0
    shared = {"--devices": devices, "--baseline-steps": steps, **asdict(config), **opened.of_model}
    hosts.start(devices, which, virtual=which.count, settings=shared)  # more would share cores
    hosts.cache_programs()
    try:
        with reporting() as reporter:
            systems = Systems(opened, config, devices, Broadcast(reporter), using)
            if not hosts.is_first():
                _help(systems, steps)
                return
            with nullcontext(SILENT) if as_json else show.bars() as bars:
                result, measured = _measure(systems, steps, bars)
    except KeyboardInterrupt:
        console.print("interrupted; run the same command again to continue")
        raise typer.Exit(130) from None
    measured = measured or work.read_results(opened.folder / "baselines.json")
    if as_json:
        print(json.dumps({**result, "baselines": measured}, indent=1))
    else:
        _show(result, measured)
        say(f"written to {opened.folder / work.EVALUATION}")


def _show(result: Mapping[str, Any], measured: Mapping[str, Any] | None) -> None:
    """Print the tables, and what their numbers mean."""

    zero = comparable(result, measured)
    console.print(task_table(result, zero))
    console.print(average_table(result, zero))
    console.print(table_by_test(result, zero))
    for line in notes(result, measured, zero):
        say(line)


def _measure(
    systems: Systems, steps: int, bars: Progress
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The results of the run, and of its baselines where they get `steps`."""
    from gshard.mt.evaluation.evaluate import evaluate as measure

    run, config = systems.run, systems.config
    with systems.broadcast.leading():
        rounded = systems.rounded if systems.engine.numbers else None
        result = measure(run, config, systems.system, bars, rounded)
    return result, _train_baselines(systems, steps, bars).measure(config, bars) if steps else None


def _help(systems: Systems, steps: int) -> None:
    """The work of the other processes while the first one measures."""
    from gshard.mt.progress import SILENT

    systems.follow()
    if steps:
        _train_baselines(systems, steps, SILENT)


def _train_baselines(systems: Systems, steps: int, bars: Progress) -> BaselineModels:
    """Train this process's share of the baselines, if there are others, and wait for theirs.

    Each process trains and translates on its own devices; results are shared on disk.
    """
    import jax

    from gshard.mt import hosts
    from gshard.mt.broadcast import meet
    from gshard.mt.config import DeviceConfig
    from gshard.mt.evaluation.baseline_plan import of_steps
    from gshard.mt.evaluation.baselines import BaselineModels

    run, config = systems.run, systems.config
    chosen = [d for d in hosts.chosen(DeviceConfig(systems.devices)) if d in jax.local_devices()]
    models = BaselineModels(run, of_steps(steps), chosen)
    systems.broadcast.alone()
    if jax.process_count() > 1:
        if mine := share_of(run, config, jax.process_index(), jax.process_count()):
            models.translate(replace(config, languages=mine), bars)
        meet("baselines")
    return models


def share_of(run: Run, config: EvaluateConfig, process: int, count: int) -> tuple[str, ...]:
    """The languages whose baselines one of `count` processes trains, long and short ones mixed."""
    from gshard.mt.evaluation.evaluate import sets_of

    sets = sets_of(run, replace(config, sentences=1))
    return tuple(dict.fromkeys(held.task.foreign for held in sets))[process::count]


def comparable(
    result: Mapping[str, Any], baselines: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any]]:
    """The baselines of those tasks that were measured on the same sentences in the same way."""
    if baselines is None or any(
        baselines.get(key) != result[key] for key in ("split", "beam", "alpha")
    ):
        return {}
    found = {}
    for name, task in result["tasks"].items():
        other = baselines["tasks"].get(name)
        if other and all(
            other.get(key) == task[key] for key in ("sentences", "copy_bleu", "bleu_signature")
        ):
            found[name] = other
    return found


def _table(title: str, rows: list[dict[str, str]], padding: int = 1, wrap: bool = False) -> Table:
    """A table of rows that have the same columns, without those that are empty in all of them.

    It fits into 80 columns of a terminal: a truncated number is a wrong number.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, padding))
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    for name in columns:
        is_name = name in ("", "task", "group", "test")
        table.add_column(name, justify="left" if is_name else "right", no_wrap=not wrap)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _scores(found: Mapping[str, Any]) -> dict[str, str]:
    return {title: f"{found[key]:.1f}" if key in found else "" for key, title in _SCORES.items()}


def _compared(bleu: float, baseline: float | None, note: str = "") -> dict[str, str]:
    if baseline is None:
        return {"baseline": "", "delta": ""}
    delta = round(bleu - baseline, 1) + 0.0  # no -0.0
    return {"baseline": f"{baseline:.1f}{note}", "delta": f"{delta:+.1f}"}


def task_table(result: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each task, the one with the most training pairs first."""
    rows, tasks = [], result["tasks"]
    for name in sorted(tasks, key=lambda name: (-tasks[name]["train_pairs"], name)):
        task = tasks[name]
        tested = f"{task['sentences']:,}{'*' if task.get('few') else ''}"
        about = {"task": name, "group": task["group"], "pairs": f"{task['train_pairs']:,}"}
        compared = _compared(task["bleu"], baselines.get(name, {}).get("bleu"))
        rows.append({**about, "tested": tested, **_scores(task), **compared})
    title = f"{result['run']}, step {result['checkpoint']:,}, {result['split']}"
    return _table(title, rows, padding=0)


def average_table(result: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]]) -> Table:
    """The means over tasks, of all and by resource; the baselines' are over the same tasks."""
    from gshard.mt.evaluation.scores import averages

    shared = {name: result["tasks"][name] for name in baselines}
    mine = averages(shared) if shared else {}
    theirs = averages({n: {**shared[n], "bleu": baselines[n]["bleu"]} for n in shared})
    rows = []
    for kind, mean in result["averages"].items():
        compared = _compared(0.0, None)
        if kind in theirs:
            some = "" if mine[kind]["tasks"] == mean["tasks"] else f" ({mine[kind]['tasks']})"
            compared = _compared(mine[kind]["bleu"], theirs[kind]["bleu"], some)
        rows.append({"": kind, "tasks": str(mean["tasks"]), **_scores(mean), **compared})
    return _table("averages over tasks", rows)


def table_by_test(result: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]]) -> Table:
    """The means by test, next to copying the most similar training sentence's translation."""
    from gshard.mt.evaluation.scores import by_test

    rows, zero = [], by_test(baselines)
    keys = {"BLEU": "bleu", "chrF++": "chrf"}
    keys |= {f"nearest {title}": f"nearest_{key}" for title, key in keys.items()}
    for test, means in result["tests"].items():
        mean = means["all"]
        found = [t["tests"][test] for t in result["tasks"].values() if test in t["tests"]]
        sentences = f"{sum(each['sentences'] for each in found):,}"
        scores = {title: f"{mean[key]:.1f}" for title, key in keys.items()}
        baseline = f"{zero[test]['all']['chrf']:.1f}" if test in zero else ""
        about = {"test": test, "tasks": str(mean["tasks"]), "sentences": sentences}
        rows.append({**about, **scores, "baseline chrF++": baseline})
    return _table("by test, averages over tasks", rows, wrap=True)


def notes(
    result: Mapping[str, Any], baselines: Mapping[str, Any] | None, compared: Mapping[str, Any]
) -> list[str]:
    """What the numbers mean: signatures, what is left out, and which baselines do not compare."""
    from gshard.mt.evaluation.scores import FEW

    tasks, usual = result["tasks"], result["signatures"]
    lines = [f"BLEU: {usual['bleu']}", f"chrF++: {usual['chrf']}"]
    for signature in sorted({task["bleu_signature"] for task in tasks.values()} - {usual["bleu"]}):
        which = [name for name, task in tasks.items() if task["bleu_signature"] == signature]
        lines.append(f"BLEU of {', '.join(which)}: {signature}")
    if numbers := result.get("rounded"):
        mean = result["averages"]["all"]
        pairs = (("BLEU", "bleu"), ("chrF++", "chrf"))
        scores = (
            f"{title} {mean[f'rounded_{key}']:.2f} ({mean[f'rounded_{key}'] - mean[key]:+.2f})"
            for title, key in pairs
        )
        lines.append(f"weights in {numbers}: {', '.join(scores)} on average over tasks")
    if few := sum(bool(task.get("few")) for task in tasks.values()):
        left_out = result["averages"]["all"]["few"]
        how = (
            "averages leave them out" if left_out else "averages include them: there are no others"
        )
        lines.append(f"* {few} tasks have fewer than {FEW} sentences; {how}")
    if baselines and len(compared) < len(tasks):
        lines.append(
            f"{len(tasks) - len(compared)} tasks have no baseline measured on the same sentences "
            "with the same search; --baselines makes them"
        )
    return lines
