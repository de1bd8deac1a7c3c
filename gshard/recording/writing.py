"""The marks of this process, written where others can read them."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard.recording.files import (
    ENDED,
    ENDING,
    KEPT,
    POSITION,
    PROGRAMS,
    ROWS,
    SLOT,
    Owner,
    ending,
    files_in,
    looked_at,
    remove,
    sweep,
)
from gshard.untrusted import own_folder, printable

VARIABLE = "GSHARD_RECORD"  # a folder; 1 for one among the temporary files; 0 for none
LAUNCHED = "GSHARD_LAUNCH_RECORD"  # the same from `gshard launch`, for programs on CPUs alone


def folder(platform: str = "") -> Path | None:
    """Where positions of devices of this platform are kept; None if they are not."""
    launched = os.environ.get(LAUNCHED, "") if platform == "cpu" else ""
    named = os.environ.get(VARIABLE, "") or launched
    if named in ("", "0"):
        return None
    if named != "1":
        return Path(named)
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"gshard-record-{os.geteuid()}"


class Recorder:
    """The files of this process, which is the one with this `index` among those of its `run`."""

    def __init__(self, place: Path, index: int, run: str = "0"):
        self._rows: dict[int, int] = {}  # of devices
        self._counts = [0] * ROWS
        self._known: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = False
        pid = os.getpid()
        self._owner = Owner(run, index, socket.gethostname(), pid, looked_at(pid)[1])
        self._position = place / f"{self._owner}{POSITION}"
        try:
            self._open(place)
        except OSError as error:
            self._stop(error)

    def _open(self, place: Path) -> None:
        folder = own_folder(place)
        try:
            sweep(place, self._owner)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._files = {
                suffix: os.open(f"{self._owner}{suffix}", flags, 0o600, dir_fd=folder)
                for suffix in (POSITION, PROGRAMS, ENDING)
            }
        finally:
            os.close(folder)
        if not faulthandler.is_enabled():  # it may be the user's, who reads it elsewhere
            faulthandler.enable(self._files[ENDING])  # XLA aborts a process that lost another
        atexit.register(self._end)

    def _stop(self, error: OSError) -> None:
        """Record no more; without its file, this process is not taken for one that is behind."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True  # files stay open: another thread may be writing to one
        remove(self._position)
        with contextlib.suppress(OSError):
            where = printable(str(self._position.parent / (error.filename or "")))
            print(f"gshard: positions are not recorded: {where}: {error.strerror}", file=sys.stderr)

    def _end(self) -> None:
        """Say how the process ended; the last one of a run to end removes its files, if all did."""
        if os.getpid() != self._owner.pid or self._stopped:  # a fork
            return
        error = getattr(sys, "last_value", None)
        words = ENDED if error is None else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(self._files[ENDING], f"{words}\n".encode(errors="replace"))
            every = files_in(self._position.parent)
            paths = [path for path, owner in every if owner.run == self._owner.run]
            if all(ending(path) == ENDED for path in paths):
                for path in paths:
                    remove(path)

    def program(self, name: str, collectives: Sequence[Mapping[str, Any]]) -> int:
        """The key of a program with these collectives, which is the same in all processes."""
        told = {"name": name, "collectives": list(collectives)}
        key = zlib.crc32(json.dumps(told).encode())
        with self._lock:
            known = key in self._known or self._stopped
            self._known.add(key)
        if not known:
            try:
                _write(self._files[PROGRAMS], f"{json.dumps([key, told])}\n".encode())
            except OSError as error:
                self._stop(error)
        return key

    def enter(self, device: int, program: int, number: int) -> None:
        """A device enters a collective."""
        if self._stopped:
            return
        try:
            row = self._rows.get(device)
            if row is None:
                row = self._row(device)
            if row >= ROWS:
                return
            count = self._counts[row]
            slot = SLOT.pack(count + 1, time.monotonic(), program << 32 | number)
            at = (row * KEPT + count % KEPT) * SLOT.size
            os.pwrite(self._files[POSITION], slot, at)
            self._counts[row] = count + 1
        except OSError as error:
            self._stop(error)

    def _row(self, device: int) -> int:
        """The row of a device that has none yet, with room on the disk from now on."""
        with self._lock:
            if device not in self._rows:
                row, size = len(self._rows), KEPT * SLOT.size
                if row < ROWS:
                    os.pwrite(self._files[POSITION], bytes(size), row * size)
                self._rows[device] = row
            return self._rows[device]


_recorder: list[Recorder] = []


def recorder(place: Path, index: int, run: Callable[[], str]) -> Recorder:
    """The recorder of this process, the `index`-th of its run; `run` gives the run's name."""
    if not _recorder:
        _recorder.append(Recorder(place, index, run()))
    return _recorder[0]


def enter(device: int, program: int, number: int) -> None:
    """A device of this process enters a collective."""
    if _recorder:
        _recorder[0].enter(device, program, number)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
