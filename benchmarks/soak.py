"""A training that is hurt again and again learns what the one left alone learns.

    python -m benchmarks.soak --faults 50 --processes 4

Trains a small model twice on made-up text under `gshard launch`: once left alone, and once with
faults at random moments in random processes. Prints a row for each fault: what was done, when it
was noticed, when the next step was made and how many steps were repeated; then where the time went,
and whether losses and weights are those of the run left alone. With `--folder` the rows are kept
there: the same command goes on after an interruption. Where a small disk may be mounted, one that
is full is among the faults.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.small_run import prepare

FAULTS = ("SIGKILL", "SIGSTOP", "flipped bit", "closed port", "full disk")
FILLER = "filler"  # what fills up the disk of a run
_GET_FD = 438  # pidfd_getfd(2), on every architecture that Linux has it on
_DISK = "64m"  # of the small disk
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
    spent: dict[str, float] = field(default_factory=dict)  # on the way back, by what was done


def steps_done(run: Path) -> int:
    """The newest step in the journal."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = [int(m[1]) for line in lines if (m := re.search(r'"train", "step": (\d+)', line))]
    return max(found, default=0)


def newest_checkpoint(run: Path) -> int:
    """The newest step that is saved whole."""
    steps = (path.name for path in (run / "checkpoints").glob("*"))
    return max((int(name) for name in steps if name.isdigit()), default=0)


def processes_of(parent: int) -> list[int]:
    """What `gshard launch` has started, in order; the shells beside them are its keepers."""
    path = Path(f"/proc/{parent}/task/{parent}/children")
    children = path.read_text().split() if path.exists() else []
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() != "sh\n"]


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
        filler = run / FILLER
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        return lambda: filler.unlink(missing_ok=True)
    return lambda: None


def close_connections(pid: int) -> None:
    """Shut down every network connection of a process, as a switch that fails would."""
    libc, handle = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
        except FileNotFoundError:  # closed meanwhile
            continue
        if (fd := libc.syscall(_GET_FD, handle, int(entry.name), 0)) < 0:
            if ctypes.get_errno() == errno.EBADF:
                continue
            raise OSError(ctypes.get_errno(), f"the connections of process {pid}")
        with socket.socket(fileno=fd) as copy, contextlib.suppress(OSError):
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.shutdown(socket.SHUT_RDWR)
    os.close(handle)


class Tormentor(threading.Thread):
    """Does faults to a run, each when the one before is over; `keep` is told of every row."""

    def __init__(
        self,
        parent: subprocess.Popen[str],
        run: Path,
        faults: list[str],
        draw: random.Random,
        keep: Callable[[Row], None],
    ):
        super().__init__(daemon=True)
        self._parent, self._run, self._faults, self._draw = parent, run, faults, draw
        self._keep = keep
        self._heard: list[tuple[float, str]] = []  # what the parent and the first process said

    def hear(self, line: str) -> None:
        """Take note of a line of the parent's output."""
        self._heard.append((time.monotonic(), line))

    def run(self) -> None:
        saved = newest_checkpoint(self._run)
        for fault in self._faults:
            # Only what is hurt after it got further can be told from what never will.
            if not self._until(lambda saved=saved: newest_checkpoint(self._run) > saved):
                return
            saved = newest_checkpoint(self._run)
            time.sleep(2 * self._draw.random())
            if not self._hurt(fault):
                return

    def _hurt(self, fault: str) -> bool:
        """One fault, until the first step after it; False if the run is over."""
        if not (members := processes_of(self._parent.pid)):
            return False
        row = Row(fault, self._draw.randrange(len(members)), steps_done(self._run))
        heard, began = len(self._heard), time.monotonic()
        undo = hurt(fault, self._run, members[row.process], self._draw)
        if fault == "full disk":  # nobody fails: what could not be saved is, when there is room
            noticed = self._said(heard, ".*could not be saved")
            saved = newest_checkpoint(self._run)
            undo()
            if noticed is None or not self._until(lambda: newest_checkpoint(self._run) > saved):
                return False
            row.noticed, row.back, row.repeated = noticed[0] - began, time.monotonic() - began, 0
            self._keep(row)
            return True
        noticed = self._said(heard, ".*go on from what is saved")
        again = self._said(heard, "launch: a step again after")
        if noticed is None or again is None:
            return False
        row.noticed, row.back = noticed[0] - began, again[0] - began
        row.spent = {
            k.strip(): float(v) for k, v in re.findall(r"([a-zA-Z ]+?) ([\d.]+)(?:,|$)", again[1])
        }
        # The parent may quote what a process had said before.
        if resumed := self._said(heard, "(?!launch:).*going on from step"):
            step = int(resumed[1].rpartition("step")[2].replace(",", ""))
            row.repeated = max(0, row.step - step)
        self._keep(row)
        return True

    def _said(self, heard: int, pattern: str) -> tuple[float, str] | None:
        """The first line since then that reads so, and when it came."""
        found: list[tuple[float, str]] = []

        def said() -> bool:
            found[:] = [each for each in self._heard[heard:] if re.match(pattern, each[1])][:1]
            return bool(found)

        return found[0] if self._until(said) else None

    def _until(self, true: Callable[[], bool], seconds: float = 1800.0) -> bool:
        deadline = time.monotonic() + seconds
        while not true():
            if self._parent.poll() is not None or time.monotonic() > deadline:
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
    from gshard.mt.training.loading import load_model

    one, other = (jax.tree.leaves(load_model(Run.open(run), "last")[0]) for run in (a, b))
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


@contextlib.contextmanager
def workplace(folder: Path | None) -> Iterator[tuple[Path, bool]]:
    """Where the runs are, and whether the hurt one is on a small disk of its own."""
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = place / "disk"
        disk.mkdir(parents=True, exist_ok=True)
        if disk.is_mount():  # of an earlier command
            yield place, True
            return
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(disk)]
        mounted = not subprocess.run(mount, capture_output=True).returncode
        if not mounted:
            print("no permission to mount a small disk: none is filled up")
        yield place, mounted
        if mounted and folder is None:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def torment(command: list[str], run: Path, faults: list[str], seed: int, keep: Any) -> int:
    """Train in `run` while faults are done to it; the exit status."""
    (run / FILLER).unlink(missing_ok=True)  # of an earlier command that was killed
    parent = subprocess.Popen(
        [*command, "--out", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    tormentor = Tormentor(parent, run, faults, random.Random(seed), keep)
    tormentor.start()
    assert parent.stdout is not None
    try:
        for line in parent.stdout:
            tormentor.hear(line.strip())
            if line.startswith("launch:"):
                print(line.strip(), flush=True)
    except BaseException:
        parent.terminate()  # the processes save, and the same command goes on from there
        raise
    return parent.wait()


def main() -> None:
    """Run both and compare them."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--faults", type=int, default=50)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--steps", type=int, default=0, help="of the training [7 a fault]")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path, help="keep everything there, and go on with it")
    given = options.parse_args()
    with workplace(given.folder) as (folder, disk):
        config = prepare(folder, given.steps or 7 * given.faults + 20, given.processes)
        kept = folder / "rows.jsonl"
        lines = kept.read_text().splitlines() if kept.exists() else []
        rows = [Row(**json.loads(line)) for line in lines]

        def keep(row: Row) -> None:
            rows.append(row)
            with kept.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(f"{len(rows):3}  {cells(row)}", flush=True)

        # At random moments any number of faults come before a new step, which is given up as a rule
        # (tests/mt/launch/test_supervisor.py); here each one is to be survived.
        patience = ["--failures", str(given.faults + 1)]
        command = [*LAUNCH, "-n", str(given.processes), *patience, "train", str(config)]
        alone, hurt_run = folder / "alone", folder / "disk" / "hurt"
        steps = json.loads(config.read_text())["train"]["steps"]
        if newest_checkpoint(alone) < steps:
            subprocess.run([*command, "--out", str(alone)], check=True, stdout=subprocess.DEVNULL)
        kinds = FAULTS if disk else FAULTS[:-1]
        faults = [kinds[n % len(kinds)] for n in range(len(rows), given.faults)]
        status = torment(command, hurt_run, faults, given.seed + len(rows), keep)
        table(rows)
        equal = losses(alone) == losses(hurt_run) and same_weights(alone, hurt_run)
        print(f"exit status {status}; losses and weights equal: {equal}")
        sys.exit(0 if equal and status == 0 and len(rows) >= given.faults else 1)


HEAD = f"{'fault':12} {'process':>7} {'at step':>7} {'noticed':>8} {'back':>8} {'repeated':>8}"


def cells(row: Row) -> str:
    """A row of the table."""
    times = [f"{v:.1f} s" if v is not None else "-" for v in (row.noticed, row.back)]
    repeated = "-" if row.repeated is None else str(row.repeated)
    return f"{row.fault:12} {row.process:7} {row.step:7} {times[0]:>8} {times[1]:>8} {repeated:>8}"


def table(rows: list[Row]) -> None:
    """Print a row for each fault, the same by kind of fault, and where the time went."""
    print(f"     {HEAD}")
    for number, row in enumerate(rows, 1):
        print(f"{number:3}  {cells(row)}")
    print(f"\n{'median, largest':16} {'faults':>6} {'noticed':>16} {'back':>16} {'repeated':>10}")
    for kind in dict.fromkeys(row.fault for row in rows):
        mine = [row for row in rows if row.fault == kind]
        figures = [
            [v for row in mine if (v := getattr(row, name)) is not None]
            for name in ("noticed", "back", "repeated")
        ]
        texts = [
            f"{statistics.median(f):.1f}, {max(f):.1f}" + (" s" if f is not figures[2] else "")
            if f
            else "-"
            for f in figures
        ]
        print(f"{kind:16} {len(mine):6} {texts[0]:>16} {texts[1]:>16} {texts[2]:>10}")
    spent = [row.spent for row in rows if row.spent]
    for doing in dict.fromkeys(name for each in spent for name in each):
        took = [each.get(doing, 0.0) for each in spent]
        print(f"on the way back, {doing}: {statistics.median(took):.1f} s")


if __name__ == "__main__":
    main()
