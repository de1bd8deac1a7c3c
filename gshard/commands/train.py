"""`gshard train`: start a run, or continue one; `gshard launch`: in several local processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gshard.commands import options
from gshard.commands.show import TrainDisplay, say, screen
from gshard.errors import UserError, nearest

if TYPE_CHECKING:
    from gshard.mt.config import RunConfig
    from gshard.mt.progress import TrainingProgress
    from gshard.mt.run import Run
    from gshard.mt.training.loop import Outcome


What = Annotated[
    str,
    typer.Argument(
        help="a preset (tiny, dense, small, base, ...), a config file, or a run",
        autocompletion=options.complete_what_to_train,
    ),
]
Settings = Annotated[
    list[str] | None, typer.Argument(help="settings as name=value, like model.experts=16")
]
Out = Annotated[Path | None, typer.Option(help="folder of the run", show_default="runs/NAME")]
CorpusFolder = Annotated[
    Path | None, typer.Option(help="folder of a gathered corpus", show_default="corpus")
]
OnRay = Annotated[
    bool, typer.Option("--ray", help="train on the nodes of a Ray cluster, supervised from here")
]
Nodes = Annotated[
    int,
    typer.Option("--hosts", help="with --ray: how many nodes", show_default="all there are", min=0),
]
BackTo = Annotated[
    int | None, typer.Option("--checkpoint", help="go back to the checkpoint of this step")
]
Checked = Annotated[
    int | None,
    typer.Option(
        "--check",
        help="compare this step, value by value, with the unpartitioned program, and stop",
        metavar="STEP",
        min=1,
    ),
]
Proved = Annotated[
    bool,
    typer.Option("--prove", help="prove that a step is the unpartitioned one, exactly, and stop"),
]
ListSettings = Annotated[
    bool, typer.Option("--settings", help="list all settings with their values, and exit")
]


def train(
    what: What = "",
    settings: Settings = None,
    out: Out = None,
    corpus: CorpusFolder = None,
    coordinator: options.Coordinator = "",
    processes: options.Processes = None,
    process: options.Process = None,
    ray: OnRay = False,
    nodes: Nodes = 0,
    least: options.Least = 0,
    languages: options.Languages = "",
    back_to: BackTo = None,
    checked: Checked = None,
    proved: Proved = False,
    list_settings: ListSettings = False,
) -> None:
    """Train a model. Ctrl-C saves it; run the same command again to continue."""
    changes = [*(settings or []), *([f"vocabulary.languages={languages}"] if languages else [])]
    config, folder = _configured(what or ("tiny" if list_settings else ""), changes, corpus)
    if list_settings:
        _list_settings(config)
        return
    if ray:
        words = [what, *changes, "--out", str((out or folder).absolute())]
        words += ["--corpus", str(corpus.absolute())] if corpus else []
        words += [] if back_to is None else ["--checkpoint", str(back_to)]
        raise typer.Exit(_on_ray(words, nodes, least))

    from gshard.mt.launch.status import reporting

    with reporting() as reporter:
        from gshard.mt import hosts

        which = options.members(coordinator, processes, process)
        hosts.start(config.devices.count, which, settings=_compared(config, back_to))
        from gshard.mt.atomic import locked
        from gshard.mt.data.corpus import Corpus
        from gshard.mt.run import Run
        from gshard.mt.training import agreement, loop

        Corpus.open(config.data.corpus)  # before creating a folder that would stay unused
        folder = out or folder
        hosts.cache_programs()
        with locked(folder) if hosts.is_first() else contextlib.nullcontext() as held:
            if hosts.is_first():
                Run.create(folder, config)
            hosts.wait_for_all("the run's folder")
            run = Run.open(folder)
            with TrainDisplay() as display:
                if proved or checked is not None:
                    raise typer.Exit(_check(run, None if proved else checked, display))
                agreement.silence_orbax_after_failure()
                hooks = loop.Hooks(display, reporter, *([held.intruder] if held else []))
                outcome = loop.train(run, hooks, back_to, keeps_step=True)
    _summarize(run, outcome)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def _check(run: Run, step: int | None, progress: TrainingProgress) -> int:
    """Check one step of a run, or prove any, and print what was found; the exit status."""
    from gshard.mt.training.prepare import check_step, prove_step

    report = prove_step(run, progress) if step is None else check_step(run, step, progress)
    progress.note(str(report))
    return 0 if report.ok else 1


def _compared(config: RunConfig, back_to: int | None) -> dict[str, object]:
    """The settings that all processes must share; paths may differ between hosts."""
    from gshard.mt.config import settings

    shared = {name: value for name, value, _ in settings(config) if not name.startswith("data.")}
    return {**shared, "--checkpoint": back_to}


def _on_ray(arguments: Sequence[str], nodes: int, least: int) -> int:
    """Train on a Ray cluster; the exit status."""
    from gshard.mt.launch.local import gshard_command
    from gshard.mt.launch.supervisor import Supervisor, without_checkpoint

    try:
        from gshard.mt.launch.ray_cluster import RayCluster
    except ImportError:
        raise UserError("--ray needs more packages: pip install 'gshard[cluster]'") from None

    def note(text: str) -> None:
        say(f"ray: {text}")

    cluster = RayCluster(os.environ.get("RAY_ADDRESS"))
    count = nodes or len(cluster.nodes())
    note(f"{count} processes on {len(cluster.nodes())} nodes")
    command = gshard_command(["train", *arguments])
    again = without_checkpoint(command)
    return Supervisor(cluster, command, count, note, least=min(least, count), again=again).run()


def _summarize(run: Run, outcome: Outcome) -> None:

    steps, done = run.config.train.steps, f"`gshard evaluate {run.folder}` measures it"
    say(
        f"step {outcome.step:,} of {steps:,}, best at step {outcome.best:,}, "
        f"{outcome.waited:.1%} of the time spent waiting for data"
    )
    stopped = f"stopped and saved; `gshard train {run.folder}` continues"
    say(done if outcome.step >= steps else stopped)


def _configured(what: str, settings: Sequence[str], corpus: Path | None) -> tuple[RunConfig, Path]:
    """The configuration that the command line asks for, and the default folder of its run."""
    from gshard.mt import config as configs
    from gshard.mt.presets import PRESETS, preset_or_file
    from gshard.mt.run import CONFIG, Run

    if not what:
        raise UserError("name what to train, as in `gshard train tiny`; see --help")
    given = [*settings, *([f"data.corpus={corpus}"] if corpus is not None else [])]
    folder = Path(what)
    # A preset, even if a folder has that name; write ./tiny for the folder.
    if what not in PRESETS and (folder / CONFIG).is_file():
        return configs.override(Run.open(folder).config, given), folder
    config = configs.override(preset_or_file(what), given)
    return config, Path("runs") / config.name


def _list_settings(config: RunConfig) -> None:
    from gshard.mt.config import settings

    for name, value, _ in settings(config):
        say(f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")


_COMMANDS = ("train", "translate", "evaluate")
# Everything after the command's name is passed to that command, options included.
LAUNCH = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def launch(
    command: Annotated[
        list[str], typer.Argument(help="train, translate or evaluate, with its arguments")
    ],
    processes: Annotated[
        int, typer.Option("-n", "--processes", help="how many processes", min=1, max=1024)
    ] = 2,
    least: options.Least = 0,
    failures: Annotated[
        int, typer.Option(help="give up after this many restarts without a new step", min=1)
    ] = 3,
) -> None:
    """Run several processes on this machine, and restart them when one dies or hangs."""
    from gshard.mt.launch.local import ThisMachine, gshard_command
    from gshard.mt.launch.supervisor import Supervisor, Timeouts, without_checkpoint

    what = command[0]
    if what not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        raise UserError(f"`gshard launch` runs {known}, not {what!r}{nearest(what, _COMMANDS)}")
    # Output that was written cannot be taken back, so these are not restarted.
    if what == "translate" and not any(word.split("=")[0] == "--out" for word in command):
        failures = 1
    # Standard output is reserved for translations.
    console = screen(stderr=what == "translate", hurried=True)

    def note(text: str) -> None:
        say(f"launch: {text}", console)

    begun = gshard_command(command)
    again = without_checkpoint(begun) if what == "train" else begun
    timeouts = Timeouts(failures=failures)
    supervisor = Supervisor(ThisMachine(), begun, processes, note, timeouts, least, again)
    raise typer.Exit(supervisor.run())
