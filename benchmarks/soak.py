"""A training that is hurt again and again learns what the one left alone learns.

    python -m benchmarks.soak --faults 50 --processes 4

Trains a small model twice on made-up text under `gshard launch`: once left alone, and once with
faults at random moments in random processes. Prints a row for each fault: what was done, when it
was noticed, when the next step was made and how many steps were repeated; then whether losses and
weights are those of the run left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

FAULTS = ("SIGKILL", "SIGSTOP", "flipped bit", "closed port", "full disk")
_GET_FD = 438  # pidfd_getfd(2), on every architecture that Linux has it on
LAUNCH = [sys.executable, "-m", "gshard.cli", "launch"]


@dataclass
class Row:
    """One fault, and what came of it; times in seconds after it."""

    fault: str
    process: int
    step: int
    noticed: float | None = None
    back: float | None = None
    repeated: int | None = None


def words(n: int, language: str) -> str:
    """A made-up sentence, other words in every language."""
    draw = random.Random(f"{language} {n % 9973}")
    letters = "aeiou" if language == "en" else "äöüyé"
    return " ".join(
        "".join(draw.choice("bdfgklmnprst") + draw.choice(letters) for _ in range(2))
        for _ in range(6)
    )


def prepare(folder: Path, steps: int, devices: int) -> Path:
    """A corpus, a vocabulary and a configuration, shared by both runs."""
    from gshard.mt import config as configs
    from gshard.mt.data.gather import GatherConfig, gather
    from gshard.mt.data.splits import Shares
    from gshard.mt.data.user_text import parse_own
    from gshard.mt.presets import preset
    from gshard.mt.run import Run

    lines = (f"de\t{words(n, 'de')}\t{words(n, 'en')}\n" for n in range(800))
    (folder / "text.tsv").write_text("".join(lines), encoding="utf-8")
    own = (parse_own("tsv", str(folder / "text.tsv"), clean=False),)
    gather(GatherConfig(folder / "corpus", own=own, shares=Shares(0.02, 0.02), jobs=1))
    settings = {
        "model.model_dim": 16,
        "model.hidden_dim": 32,
        "model.heads": 2,
        "model.key_dim": 8,
        "model.value_dim": 8,
        "model.experts": 4,
        "model.groups": 4,
        "vocabulary.source_size": 400,
        "vocabulary.target_size": 400,
        "batch.rows": 8,
        "train.steps": steps,
        "train.save_every": 5,
        "train.log_every": 1,
        "train.keep": 4,
        "train.dev_batches": 1,
        "devices.count": devices,
        "data.corpus": folder / "corpus",
    }
    config = configs.override(
        preset("tiny"), [f"{name}={value}" for name, value in settings.items()]
    )
    run = Run.create(folder / "prepared", config)
    run.make_vocabulary()
    made = f"data.vocabulary={run.folder / 'vocabulary'}"
    path = folder / "config.json"
    path.write_text(json.dumps(configs.to_json(configs.override(config, [made]))))
    return path


def steps_done(run: Path) -> int:
    """The newest step in the journal."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = [int(m[1]) for line in lines if (m := re.search(r'"train", "step": (\d+)', line))]
    return max(found, default=0)


def processes_of(parent: int) -> list[int]:
    """The children of a process, in the order in which they were started."""
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def hurt(fault: str, run: Path, pid: int, draw: random.Random) -> Callable[[], None]:
    """Do harm; the result takes it back, where that needs somebody."""
    if fault == "SIGSTOP":
        os.kill(pid, signal.SIGSTOP)
    elif fault == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
    elif fault == "closed port":
        close_connections(pid)
    elif fault == "flipped bit":
        steps = sorted((run / "checkpoints").glob("[0-9]*"), key=lambda p: p.stat().st_mtime)
        files = [f for s in steps[-1:] for f in s.rglob("*") if f.is_file() and f.stat().st_size]
        if files:
            file = draw.choice(files)
            data = bytearray(file.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
        os.kill(pid, signal.SIGKILL)  # so that the checkpoint is needed
    elif fault == "full disk":
        filler = run / "filler"
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass
        return lambda: filler.unlink(missing_ok=True)
    return lambda: None


def close_connections(pid: int) -> None:
    """Shut down every network connection of a process, as a switch that fails would."""
    libc, handle = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if not os.readlink(entry).startswith("socket:"):
            continue
        if (fd := libc.syscall(_GET_FD, handle, int(entry.name), 0)) < 0:
            raise OSError(ctypes.get_errno(), f"the connections of process {pid}")
        with socket.socket(fileno=fd) as copy, contextlib.suppress(OSError):
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.shutdown(socket.SHUT_RDWR)
    os.close(handle)


class Tormentor(threading.Thread):
    """Does `count` faults to a run, each when the one before is over."""

    def __init__(self, parent: subprocess.Popen[str], run: Path, count: int, disk: bool, seed: int):
        super().__init__(daemon=True)
        self._parent, self._run, self._count = parent, run, count
        self._faults = FAULTS if disk else FAULTS[:-1]
        self._draw = random.Random(seed)
        self.rows: list[Row] = []
        self.noticed: list[float] = []  # when the parent said something, by its output

    def run(self) -> None:
        for number in range(self._count):
            if not self._hurt_once(self._faults[number % len(self._faults)]):
                return

    def _hurt_once(self, fault: str) -> bool:
        """One fault, from a few steps before it to the first step after; False at the end."""
        start = self._step()
        if not self._until(lambda: self._step() >= start + 2):
            return False
        time.sleep(self._draw.random())
        if not (members := processes_of(self._parent.pid)):
            return False
        row = Row(fault, self._draw.randrange(len(members)), self._step())
        self.rows.append(row)
        heard, began = len(self.noticed), time.time()
        undo = hurt(fault, self._run, members[row.process], self._draw)
        if fault == "full disk":  # nobody fails: training goes on, and saves when there is room
            self._until(lambda: self._step() >= row.step + 2, 30)
            undo()
            row.back, row.repeated = time.time() - began, 0
            return True
        if not self._until(lambda: len(self.noticed) > heard):
            return False
        row.noticed = self.noticed[heard] - began
        # The journal is cut back to the checkpoint when the run goes on.
        self._until(lambda: self._step() < row.step, 60)
        again = self._step()
        row.repeated = row.step - again
        self._until(lambda: self._step() > again)
        row.back = time.time() - began
        return True

    def _step(self) -> int:
        return steps_done(self._run)

    def _ended(self) -> bool:
        return self._parent.poll() is not None

    def _until(self, true: Callable[[], bool], seconds: float = 1800.0) -> bool:
        deadline = time.time() + seconds
        while not true():
            if self._ended() or time.time() > deadline:
                return False
            time.sleep(0.05)
        return True


def losses(run: Path) -> dict[tuple[str, int], Any]:
    """The losses in a run's journal."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {(r["kind"], r["step"]): r["nll"] for r in records}


def same_weights(a: Path, b: Path) -> bool:
    """Whether the last checkpoints of two runs hold the same bits."""
    from gshard.mt.run import Run
    from gshard.mt.training.checkpoint import load_model

    one, other = (jax.tree.leaves(load_model(Run.open(run), "last")[0]) for run in (a, b))
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def main() -> None:
    """Run both and compare them."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--faults", type=int, default=50)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--steps", type=int, default=0, help="of the training [6 a fault]")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path, help="on a small disk: also fill it up")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        config = prepare(folder, given.steps or 6 * given.faults + 20, given.processes)
        launched = [*LAUNCH, "-n", str(given.processes), "train", str(config)]
        alone, hurt_run = folder / "alone", folder / "hurt"
        subprocess.run([*launched, "--out", str(alone)], check=True, stdout=subprocess.DEVNULL)
        parent = subprocess.Popen(
            [*launched, "--out", str(hurt_run)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        tormentor = Tormentor(parent, hurt_run, given.faults, given.folder is not None, given.seed)
        tormentor.start()
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.startswith("launch:"):
                print(line.strip(), flush=True)
            if line.startswith("launch:") and "go on from" in line:
                tormentor.noticed.append(time.time())
        status = parent.wait()
        table(tormentor.rows)
        equal = losses(alone) == losses(hurt_run) and same_weights(alone, hurt_run)
        print(f"exit status {status}; losses and weights equal: {equal}")
        sys.exit(0 if equal and status == 0 else 1)


def table(rows: list[Row]) -> None:
    """Print a row for each fault."""
    print(f"{'fault':12} {'process':>7} {'at step':>7} {'noticed':>8} {'back':>8} {'repeated':>8}")
    for row in rows:
        cells = [f"{v:.1f} s" if v is not None else "-" for v in (row.noticed, row.back)]
        repeated = "-" if row.repeated is None else str(row.repeated)
        print(
            f"{row.fault:12} {row.process:7} {row.step:7} {cells[0]:>8} {cells[1]:>8} {repeated:>8}"
        )


if __name__ == "__main__":
    main()
