"""`python -m benchmarks.hangs_training`: hangs in a real training, as `gshard launch` names them.

`gshard train` runs as several processes under the supervisor of `gshard launch`. In each attempt
one process is made to hang the others: it is stopped or killed at a collective, leaves a step out,
calls another program, gets a batch of another shape, or waits for data. The supervisor has to name
it, and at which collective and line the others wait; then it starts all again, and training
continues up to the next hang, and to the end.

    python -m benchmarks.hangs_training                      2 processes, then 4
    python -m benchmarks.hangs_training --rows rows.jsonl    keeps every hang that was named; run
                                                             again, it plants the others
    python -m benchmarks.hangs_training --cost 60            what recording costs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gshard import recording
from gshard.mt.training.weights import CHECKSUMS

KINDS = ("stop", "die", "skip", "branch", "shape", "loader")
_EITHER = ("skip", "branch", "shape")  # two processes that differ: nobody knows who is right
_AT = 6  # the step of an attempt that is planted; the one at 4 is saved
_SAVED = 4
_PATIENCE = 10.0  # seconds for a save; after 15 without a step the supervisor takes it for a hang
_COLLECTIVE = 2  # of the step, counted from 0
SECONDS = 30.0  # in which a hang has to be named
_FOLDER = "GSHARD_HANGS"  # the variable that names the folder of what was planted
SETTINGS = (
    "model.model_dim=16 model.hidden_dim=32 model.heads=2 model.key_dim=8 model.value_dim=8 "
    "vocabulary.source_size=500 vocabulary.target_size=450 batch.rows=8 data.workers=0 "
    f"train.log_every=1 train.dev_batches=2 train.save_every={_SAVED}"
).split()


# ---------------------------------------------------------------- in the processes


class Plant:
    """The hang of this attempt, in one of its processes."""

    def __init__(self, kind: str, note: Path, run: Path):
        self._kind, self._note, self._calls = kind, note, 0
        self._run, self._before = run, _saved(run)

    def install(self) -> None:
        """Make the training call this in place of its step, and of its reading of batches."""
        from gshard.mt.batching import batches
        from gshard.mt.training.programs import Programs

        step, read = Programs.step, batches.BatchIterator.__next__
        compiled = Programs.compile

        def compiling(programs: Any, arrays: Any) -> Any:
            if self._kind == "shape":  # now: a step that compiles takes long, too
                compiled(programs, _shorter(arrays))
            return compiled(programs, arrays)

        def stepped(programs: Any, state: Any, arrays: Any) -> Any:
            self._calls += 1
            if self._calls != _AT or self._kind == "loader":
                self._figures = step(programs, state, arrays)
                return self._figures
            return self._hang(lambda: step(programs, state, arrays), programs, state, arrays)

        def waited(iterator: Any) -> Any:
            if self._kind == "loader" and self._calls == _AT - 1:
                self._planted()
                time.sleep(3600)
            return read(iterator)

        # Planted in the classes: the training makes its own objects.
        Programs.compile = compiling  # type: ignore[method-assign]  # the planted hang replaces it
        Programs.step = stepped  # type: ignore[method-assign]  # the planted hang replaces it
        batches.BatchIterator.__next__ = waited  # type: ignore[method-assign]  # the planted hang replaces it

    def _planted(self) -> None:
        """Write down when; before that, let the checkpoint of this attempt become complete."""
        begun = time.monotonic()
        while _saved(self._run) == self._before and time.monotonic() - begun < _PATIENCE:
            time.sleep(0.1)
        self._note.write_text(str(time.monotonic()))

    def _hang(self, step: Any, programs: Any, state: Any, arrays: Any) -> Any:
        if self._kind in ("stop", "die"):
            self._at_a_collective(signal.SIGSTOP if self._kind == "stop" else signal.SIGKILL)
            return step()
        self._planted()
        if self._kind == "branch":
            programs.dev(state.train.model, arrays)
        elif self._kind == "shape":
            return programs.step(state, _shorter(arrays))
        return state, self._figures[1]  # the step is left out

    def _at_a_collective(self, number: int) -> None:
        enter, entered = recording.Recorder.enter, 0

        def ended(recorder: Any, *where: Any) -> None:
            nonlocal entered
            entered += 1
            enter(recorder, *where)
            if entered == _COLLECTIVE + 1:
                self._planted()
                signal.pthread_kill(threading.get_ident(), number)

        recording.Recorder.enter = ended  # type: ignore[method-assign]  # the planted hang replaces it


def _saved(run: Path) -> int:
    """The step of the newest complete checkpoint of a run; 0 if there is none."""
    names = [path.parent.name for path in run.glob(f"checkpoints/*/{CHECKSUMS}")]
    return max([int(name) for name in names if name.isdigit()], default=0)


def _shorter(arrays: Any) -> Any:
    return {name: x[:, : x.shape[1] // 2] for name, x in arrays.items()}


def worker(plants: list[str], arguments: list[str]) -> None:
    """One process of the training; `plants` are KIND:PROCESS, one for each attempt."""
    from gshard.cli import main as gshard

    folder = Path(os.environ[_FOLDER])
    attempt = len(list(folder.iterdir()))
    if attempt < len(plants):
        kind, process = plants[attempt].split(":")
        if process == os.environ["GSHARD_PROCESS"]:
            run = Path(arguments[arguments.index("--out") + 1])
            Plant(kind, folder / str(attempt), run).install()
    sys.argv = ["gshard", *arguments]
    gshard()


# ---------------------------------------------------------------- who plants the hangs


def corpus(folder: Path) -> Path:
    """A corpus of made-up sentences."""
    from gshard.mt.data.gather import GatherConfig, gather
    from gshard.mt.data.splits import HeldOutShares
    from gshard.mt.data.user_text import parse_own

    words = ["small", "house", "river", "green", "tree", "old", "red", "door", "bridge", "window"]
    text = [" ".join(words[(n * k) % len(words)] for k in range(1, 9)) for n in range(1, 400)]
    lines = [f"de\t{line[::-1]} {n}\t{line} {n}" for n, line in enumerate(text)]
    (folder / "own.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    own = (parse_own("tsv", str(folder / "own.tsv")),)
    gather(GatherConfig(folder / "corpus", own=own, shares=HeldOutShares(0.1, 0.1), jobs=1))
    return folder / "corpus"


@dataclasses.dataclass
class Found:
    """What the supervisor printed about one hang."""

    processes: int
    kind: str
    process: int
    seconds: float
    words: str

    def is_right(self) -> bool:
        """Whether host, process, collective and line are named, and within the time."""
        waiting, _, culprit = self.words.partition("; ")
        host = re.escape(socket.gethostname())
        named = re.findall(rf"process (\d+) \(\d+ on {host}", culprit)
        waits = re.findall(rf"process (\d+) \(\d+ on {host}", waiting)
        others = [str(n) for n in range(self.processes) if n != self.process]
        right = (named, waits) == ([str(self.process)], others)
        if self.processes == 2 and self.kind in _EITHER:
            right = len(named) == len(waits) == 1
        line = r"collective \d+ of step \(\w+ of [\d,]+ bytes, \S+\.py:\d+\)"
        return right and bool(re.search(line, self.words)) and self.seconds <= SECONDS

    def __str__(self) -> str:
        cells = self.processes, self.kind, self.process, f"{self.seconds:.1f} s"
        return f"| {' | '.join(map(str, cells))} | {'yes' if self.is_right() else 'NO'} |"


def culprit(kind: str, processes: int) -> int:
    """The process that hangs the others: in turn the first and the last."""
    return (processes - 1) * (KINDS.index(kind) % 2)


def launched(processes: int, kinds: list[str], folder: Path, keep: Callable[[Found], None]) -> None:
    """Hangs in one training of so many processes; each is kept as soon as it is named."""
    from gshard.mt.launch.local import ThisMachine
    from gshard.mt.launch.supervisor import Supervisor

    planted = folder / f"planted-{processes}"
    planted.mkdir()
    os.environ[_FOLDER] = str(planted)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # programs are compiled faster
    found: list[Found] = []

    def note(text: str) -> None:
        print(f"launch: {text}", flush=True)
        if not text.startswith("where they are: "):
            return
        number = len(list(planted.iterdir())) - 1
        if number < len(found):
            print("launch: no hang was planted: a step took too long", flush=True)
            return
        seconds = time.monotonic() - float((planted / str(number)).read_text())
        kind = kinds[number]
        words = text.partition(": ")[2]
        found.append(Found(processes, kind, culprit(kind, processes), seconds, words))
        keep(found[-1])

    steps = _SAVED * (len(kinds) + 1)
    plants = ",".join(f"{kind}:{culprit(kind, processes)}" for kind in kinds)
    arguments = ["train", "tiny", *SETTINGS, f"train.steps={steps}", f"devices.count={processes}"]
    arguments += ["--corpus", str(folder / "corpus"), "--out", str(folder / f"run-{processes}")]
    command = [sys.executable, "-m", "benchmarks.hangs_training", "--worker", plants]
    status = Supervisor(ThisMachine(), [*command, "--", *arguments], processes, note).run()
    if status or len(found) != len(kinds):
        sys.exit(f"the training ended with {status} after {len(found)} of {len(kinds)} hangs")


def read(store: Path) -> list[Found]:
    """The hangs that were named in earlier runs."""
    lines = store.read_text().splitlines() if store.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def table(counts: list[int], kinds: list[str], store: Path) -> list[Found]:
    """All hangs of trainings of these numbers of processes: those in the file, and the others."""
    found = read(store)

    def keep(each: Found) -> None:
        found.append(each)
        with store.open("a") as file:
            print(json.dumps(dataclasses.asdict(each)), file=file)

    with tempfile.TemporaryDirectory(prefix="gshard-hangs-") as name:
        corpus(Path(name))
        for processes in counts:
            done = {each.kind for each in found if each.processes == processes}
            if left := [kind for kind in kinds if kind not in done]:
                launched(processes, left, Path(name), keep)
    return [f for f in found if f.processes in counts and f.kind in kinds]


# ---------------------------------------------------------------- what recording costs


def cost(seconds: float) -> tuple[float, tuple[float, float], int]:
    """Time of a step of the preset `tiny` with marks, of that without; and the marks of a step."""
    import jax
    import numpy as np

    from benchmarks import paired
    from gshard.mt.config import DeviceConfig
    from gshard.mt.hosts import strategy
    from gshard.mt.presets import preset
    from gshard.mt.training.programs import Programs, Setup
    from gshard.nn.config import Batch

    jax.config.update("jax_num_cpu_devices", 2)
    config = preset("tiny")
    model = dataclasses.replace(config.model, source_vocab=4_000, target_vocab=2_000)
    rng = np.random.default_rng(0)
    rows, source, target = config.batch.rows, config.batch.source_length, config.batch.target_length
    tokens = [rng.integers(1, 2_000, (rows, n)) for n in (source, target)]
    arrays = {k: np.asarray(v) for k, v in Batch.of(*tokens)._asdict().items()}
    runs, marks = {}, 0
    with tempfile.TemporaryDirectory() as name:
        for what, place in (("recorded", name), ("plain", "")):
            os.environ[recording.VARIABLE] = place
            how = strategy(DeviceConfig(2))
            programs = Programs(Setup(config, model, jax.devices(), how))
            programs.compile(arrays)
            runs[what] = _repeated(programs, arrays)
            runs[what]()
        before = sum(p.entered for p in recording.read(Path(name)))
        jax.block_until_ready(runs["recorded"]())
        marks = sum(p.entered for p in recording.read(Path(name))) - before
        _, processor = paired.timed(runs, seconds)
    return statistics.median(processor["plain"]), _ratio(processor), marks


def _ratio(times: dict[str, list[float]]) -> Any:
    from benchmarks import paired

    low, high = paired.interval(times, "recorded", "plain")
    return paired.median_ratio(times, "recorded", "plain"), low, high


def _repeated(programs: Any, arrays: Any) -> Any:
    state = programs.first_state()

    def run() -> Any:
        nonlocal state
        state, figures = programs.step(state, arrays)
        return figures

    return run


def main() -> None:
    """Plant, and print a line for each; exit status 1 if one was not named right, and in time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="2,4", help="of the trainings, in turn")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of hangs, in turn")
    parser.add_argument("--rows", type=Path, help="where named hangs are kept, and found again")
    parser.add_argument("--cost", type=float, default=0.0, metavar="SECONDS",
                        help="measure for so long what recording costs instead")  # fmt: skip
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.worker:
        return worker(options.worker.split(","), options.arguments)
    if options.cost:
        step, (ratio, low, high), marks = cost(options.cost)
        print(
            f"a step of {1e3 * step:.0f} ms with {marks} marks takes {ratio:.3f} times the "
            f"processor time of one without ({low:.3f} to {high:.3f})"
        )
        return None
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: the kinds are {', '.join(KINDS)}")
    counts = [int(text) for text in options.processes.split(",")]
    with tempfile.TemporaryDirectory(prefix="gshard-hangs-") as name:
        found = table(counts, kinds, options.rows or Path(name, "rows.jsonl"))
    print(
        "| processes | hang | by process | named after | right |", "|---|---|---|---|---|", sep="\n"
    )
    print(*sorted(found, key=lambda each: (each.processes, KINDS.index(each.kind))), sep="\n")
    right, longest = sum(each.is_right() for each in found), max(each.seconds for each in found)
    named = f"{right} of {len(found)} hangs of a training named right within {SECONDS:.0f} s"
    print(f"{named}; {longest:.1f} s at most")
    return sys.exit(right < len(found))


if __name__ == "__main__":
    main()
