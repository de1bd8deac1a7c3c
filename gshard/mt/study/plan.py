"""A study as it is written down: a TOML file with its runs, their baselines and how to measure.

`docs/howto/study.md` has an example. The progress of a study is read from the folders of its runs:
there is no other record. A stage that ended leaves a small file in the run's folder
(`trained.json`, `translated.json`, `evaluation.json`), so that a study can be resumed after any
interruption, also on another machine, to which only these and the translations have to be copied
for scoring.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from gshard.errors import UserError, nearest
from gshard.mt import atomic
from gshard.mt.atomic import known_object
from gshard.mt.config import RunConfig, conflicts, override
from gshard.mt.evaluation.baseline_plan import SIZES, BaselineConfig, of_steps
from gshard.mt.evaluation.baselines import BASELINES
from gshard.mt.evaluation.evaluate import EVALUATION, EvaluateConfig, System
from gshard.mt.presets import preset_or_file
from gshard.mt.run import read_metrics
from gshard.mt.typed import checked

if TYPE_CHECKING:
    from rich.table import Table

ENDLESS = 1_000_000_000  # steps of a run that a number of seconds ends
_LENGTHS = ("steps", "tokens", "seconds", "seconds_of")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study; exactly one of `steps`, `tokens`, `seconds`, `seconds_of` is given."""

    name: str
    config: RunConfig
    steps: int = 0
    tokens: int = 0  # target tokens
    seconds: float = 0.0  # of training, without compiling
    seconds_of: str = ""  # as many as that run took
    goes_on_from: str = ""
    teacher: str = ""  # the run that it is distilled from
    label: str = ""  # what figures call it


@dataclass(frozen=True)
class PlannedBaselines:
    """The bilingual models of a study: the run whose vocabulary they share, and their training."""

    of: str
    config: BaselineConfig


@dataclass(frozen=True)
class Study:
    """All of a study."""

    path: Path
    folder: Path
    runs: tuple[PlannedRun, ...]
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    baselines: PlannedBaselines | None = None
    compare: tuple[tuple[str, str], ...] = ()  # pairs of runs that the bootstrap is made for

    def run(self, name: str) -> PlannedRun:
        """The run of that name."""
        known = {run.name: run for run in self.runs}
        if name not in known:
            raise UserError(f"{self.path} plans no run {name!r}{nearest(name, known)}")
        return known[name]

    def place(self, name: str) -> Path:
        """The folder of a run."""
        return self.folder / name


def read_plan(path: str | Path) -> Study:
    """The plan in a file; an error names what is wrong in it and where."""
    path = Path(path)
    try:
        found = tomllib.loads(atomic.read_text(path))
    except FileNotFoundError:
        raise UserError(f"no plan at {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    found = checked(_PLAN, found, f"{path}: ")
    runs = tuple(_runs(found, path))
    plan = Study(
        path=path,
        folder=path.parent / found.get("folder", path.stem),
        runs=runs,
        evaluate=found.get("evaluate", EvaluateConfig()),
        baselines=_baselines(found["baselines"], path) if "baselines" in found else None,
        compare=found.get("compare", ()),
    )
    for run in runs:
        _check_order(plan, run)
    if plan.baselines:
        plan.run(plan.baselines.of)
    for pair in plan.compare:
        for name in pair:
            plan.run(name)
    return plan


_TABLE = dict[str, Any]
_PLAN = {
    "corpus": str, "folder": str, "preset": str, "settings": _TABLE, "evaluate": EvaluateConfig,
    "baselines": _TABLE, "compare": tuple[tuple[str, str], ...], "runs": tuple[_TABLE, ...],
}  # fmt: skip
_OWN = {name: kind for name, kind in get_type_hints(PlannedRun).items() if name != "config"}
_RUN = {**_OWN, "preset": str, "seed": int, "settings": _TABLE}
_TRAINED = {n: kind for n, kind in get_type_hints(BaselineConfig).items() if n != "training"}
_BASELINES = {**_TRAINED, "of": str, "fall": float}


def _runs(found: Mapping[str, Any], path: Path) -> Iterator[PlannedRun]:
    entries = found.get("runs")
    if not entries:
        raise UserError(f"{path} plans no runs: each is a table [[runs]] with a name")
    names: set[str] = set()
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f"{path}: the name of a run is {name!r}; it names its folder")
        if name in names:
            raise UserError(f"{path}: two runs are called {name!r}")
        names.add(name)
        yield _run(found, checked(_RUN, entry, f"{path}: run {name!r}: "), name, path)


def _run(found: Mapping[str, Any], entry: Mapping[str, Any], name: str, path: Path) -> PlannedRun:
    given = [length for length in _LENGTHS if length in entry]
    if len(given) != 1:
        raise UserError(
            f"{path}: run {name!r} has {' and '.join(given) or 'no length'}; "
            f"it needs one of {', '.join(_LENGTHS)}"
        )
    (length,) = given
    value = entry[length]
    if not isinstance(value, str) and not value > 0:
        raise UserError(f"{path}: run {name!r}: {length} = {value!r}")
    corpus = path.parent / found.get("corpus", "corpus")
    usual = preset_or_file(entry.get("preset", found.get("preset", "tiny")), path.parent)
    settings = [f"name={name}", f"data.corpus={corpus}"]
    settings += assignments(found.get("settings", {}))
    settings += assignments(entry.get("settings", {}))
    settings += [f"train.seed={entry['seed']}"] if "seed" in entry else []
    settings += [f"train.steps={value if length == 'steps' else ENDLESS}"]
    try:
        config = override(usual, settings)
    except UserError as error:
        raise UserError(f"{path}: run {name!r}: {error}") from None
    planned = {each: x for each, x in entry.items() if each in _OWN}
    return PlannedRun(config=config, **{"label": name, **planned})


def assignments(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested tables as the `name=value` of the command line."""
    found = []
    for name, value in table.items():
        if isinstance(value, dict):
            found += assignments(value, f"{prefix}{name}.")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append(f"{prefix}{name}={text.lower() if isinstance(value, bool) else text}")
    return found


def _check_order(plan: Study, run: PlannedRun) -> None:
    """Check that a run depends on earlier ones only, and continues one with its settings."""
    names = [each.name for each in plan.runs]
    for other in filter(None, (run.seconds_of, run.goes_on_from, run.teacher)):
        if names.index(plan.run(other).name) >= names.index(run.name):
            raise UserError(f"{plan.path}: {run.name!r} needs {other!r}, which comes after it")
    if not run.goes_on_from:
        return
    before = plan.run(run.goes_on_from)
    # The steps of a run that a clock ends are in its checkpoint, which is checked as well.
    if different := conflicts(before.config, run.config, before.steps):
        lines = "; ".join(different)
        raise UserError(f"{plan.path}: {run.name!r} cannot continue {run.goes_on_from!r}: {lines}")


def _baselines(table: Mapping[str, Any], path: Path) -> PlannedBaselines:
    found = checked(_BASELINES, table, f"{path}: baselines: ", required=("of",))
    of, sizes = found.pop("of"), found.pop("sizes", SIZES)
    sizes = tuple(sorted(sizes, key=lambda size: -size.pairs))
    if not sizes or sizes[-1].pairs:
        raise UserError(f"{path}: one of the baselines' sizes must be for 0 pairs and more")
    config = of_steps(found.pop("steps", BaselineConfig().steps), found.pop("fall", 0.0))
    return PlannedBaselines(of, replace(config, sizes=sizes, **found))


Stage = Literal["waiting", "begun", "trained", "translated", "scored"]
STAGES: tuple[Stage, ...] = ("waiting", "begun", "trained", "translated", "scored")
TRAINED, TRANSLATED = "trained.json", "translated.json"
BASELINES_TRANSLATED = "baselines-translated.json"


@dataclass(frozen=True)
class Entry:
    """What is known of one run of a study."""

    name: str
    label: str
    stage: Stage
    length: str  # as the plan has it
    step: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    dev_nll: float | None = None
    bleu: float | None = None
    chrf: float | None = None

    def reached(self, stage: Stage) -> bool:
        """Whether that stage is done."""
        return STAGES.index(self.stage) >= STAGES.index(stage)


def entry(plan: Study, run: PlannedRun) -> Entry:
    """How far a run is."""
    place = plan.place(run.name)
    files = (TRAINED, TRANSLATED, EVALUATION)
    trained, translated, scores = (known_object(place / name) for name in files)
    records = read_metrics(place)
    dev = [record for record in records if record.get("kind") == "dev"]
    last: dict[str, Any] = trained or (records[-1] if records else {})
    stage: Stage = "begun" if records else "waiting"
    if trained:
        stage = "trained"
        if translated and translated["step"] == trained["step"]:
            stage = "translated"
            if scores and scores.get("checkpoint") == translated["step"]:
                stage = "scored"
    means = scores["averages"]["all"] if scores and stage == "scored" else {}
    return Entry(
        run.name,
        run.label,
        stage,
        length_of(run),
        int(last.get("step", 0)),
        float(last.get("tokens", 0.0)),
        float(last.get("seconds", 0.0)),
        float(dev[-1]["nll"]) if dev and dev[-1].get("nll") is not None else None,
        means.get("bleu"),
        means.get("chrf"),
    )


def made_by(plan: Study, name: str) -> System:
    """What has translated, of a run that may not be here: its translations are."""
    place = plan.place(name)
    note = known_object(place / TRANSLATED)
    if note is None:
        raise UserError(f"{place} has not been translated with yet")

    def gone(*_: Any) -> Any:
        raise UserError(
            f"translations of {place} are missing; remove its {TRANSLATED}, and the study "
            "makes them again where its checkpoints are"
        )

    loads = gone if plan.run(name).config.model.experts else None
    return System(note["step"], note["digest"], note["weights"], gone, loads)


def length_of(run: PlannedRun) -> str:
    """How long a run is planned, in words."""
    if run.seconds_of:
        return f"as long as {run.seconds_of}"
    if run.seconds:
        return f"{run.seconds:g} s"
    return f"{run.tokens:,} tokens" if run.tokens else f"{run.steps:,} steps"


def baselines_stage(plan: Study) -> Stage | None:
    """How far the baselines are; None if none are planned."""
    if plan.baselines is None:
        return None
    place = plan.place(plan.baselines.of)
    if (place / BASELINES).is_file():
        return "scored"
    if (place / BASELINES_TRANSLATED).is_file():
        return "translated"
    return "begun" if (place / "baselines").is_dir() else "waiting"


def overview_table(plan: Study) -> Table:
    """A row for each run, in the order of the plan."""
    from rich import box
    from rich.table import Table

    table = Table(title=str(plan.path), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold", min_width=12)
    table.add_column("stage", no_wrap=True)
    table.add_column("planned", overflow="fold")
    for column in ("steps", "tokens", "min", "dev", "BLEU", "chrF++"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in plan.runs:
        found = entry(plan, run)
        begun = found.reached("begun")
        numbers = [
            f"{found.step:,}" if begun else "",
            f"{found.tokens / 1e6:.1f}M" if begun else "",
            f"{found.seconds / 60:.1f}" if begun else "",
            *(
                "" if value is None else f"{value:.{digits}f}"
                for value, digits in ((found.dev_nll, 3), (found.bleu, 1), (found.chrf, 1))
            ),
        ]
        table.add_row(run.name, found.stage, found.length, *numbers)
    if stage := baselines_stage(plan):
        table.add_row("baselines", stage, "", *[""] * 6)
    return table


def lines(plan: Study) -> list[str]:
    """What is done, and what comes next."""
    entries = [entry(plan, run) for run in plan.runs]
    done = sum(each.stage == "scored" for each in entries)
    found = [f"{done} of {len(entries)} runs are done"]
    following = [each for each in entries if each.stage != "scored"]
    if following:
        first = following[0]
        stages = {"trained": "to be translated with", "translated": "to be scored"}
        what = stages.get(first.stage, "to be trained")
        found.append(f"next: {first.name}, {what} (`gshard study {plan.path}` continues)")
    elif baselines_stage(plan) not in (None, "scored"):
        found.append(f"next: the baselines (`gshard study {plan.path}` continues)")
    return found
