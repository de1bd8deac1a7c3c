"""Processes of a training on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gshard.errors import UserError
from gshard.mt.launch import status
from gshard.mt.launch.status import recorded

_TAIL = 2_000  # bytes of a process's output to look for its last words in


class LocalChild:
    """A process that was started here; `quiet` ones write to a file, for when they fail.

    It has a process group of its own, which ends with it, and with the process that started it.
    """

    def __init__(self, command: Sequence[str], more: Mapping[str, str], place: Path, quiet: bool):
        self._status, self._log = place.with_suffix(".json"), place.with_suffix(".log")
        self._status.write_bytes(bytes(status.SIZE))
        self._last = status.Status()
        self.begun = time.monotonic()
        self._keeper: Keeper | None = Keeper()
        with self._log.open("wb") as file:
            try:
                self._popen = subprocess.Popen(
                    command,
                    env={**os.environ, **more, status.VARIABLE: str(self._status)},
                    stdout=file if quiet else None,
                    stderr=subprocess.STDOUT if quiet else None,
                    start_new_session=True,  # Ctrl-C is for the parent to hand on
                )
            except BaseException:
                self._keeper.dismiss()
                raise
        self._keeper.watch(self._popen.pid)

    def poll(self) -> int | None:
        """Its exit status, if it has ended; a signal's number is negative."""
        code = self._popen.poll()
        if code is not None and self._keeper is not None:
            self._kill_group()  # its helpers, at once: later the number may be another's
            self._keeper.dismiss()
            self._keeper = None
        return code

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def status(self) -> status.Status:
        """What it says of itself, and whether it has been stopped."""
        found = status.read(self._status)
        if found.seen:
            self._last = found
        return replace(self._last, stopped=self._is_stopped())

    def _is_stopped(self) -> bool:
        try:
            found = os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except (ChildProcessError, AttributeError):  # it has ended; a system without this call
            return False
        return found is not None

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def end(self) -> None:
        """End it, whatever it does, and wait until it has."""
        if self.poll() is None:
            self._kill_group()
            self._popen.wait()
            self.poll()

    def last_words(self) -> str:
        """The last line of its output that is for people, and not a trace of C++ code."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.removeprefix("gshard: ").strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith(("@", "***", "PC:", "0x"))]
        return lines[-1][:300] if lines else ""


class ThisMachine:
    """Where `gshard launch` starts processes: as many as are asked for."""

    look = 0.2  # seconds between two looks at the processes

    def capacity(self, wanted: int) -> int:
        """How many processes can be started now, of those that are wanted."""
        return wanted

    def start(self, command: Sequence[str], count: int, scratch: Path) -> list[LocalChild]:
        """Start `count` processes that know of each other."""
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        children: list[LocalChild] = []
        record = recorded(scratch)
        try:
            for index in range(count):
                more = {**member(address, count, index), **_gpus(index, count), **record}
                # The first one's output is the user's.
                place, quiet = scratch / f"process-{index}", index > 0
                children.append(LocalChild(command, more, place, quiet))
        except OSError as error:
            for child in children:
                child.end()
            raise UserError(
                f"process {len(children)} of {count} could not be started: {error.strerror}"
            ) from None
        return children


def member(address: str, count: int, index: int) -> dict[str, str]:
    """The variables by which a process knows which one it is (`environment`)."""
    return {
        "GSHARD_COORDINATOR": address,
        "GSHARD_PROCESSES": str(count),
        "GSHARD_PROCESS": str(index),
    }


def free_port(host: str) -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def gshard_command(arguments: Sequence[str]) -> list[str]:
    """The command line that runs gshard with this interpreter."""
    return [sys.executable, "-m", "gshard.cli", *arguments]


def _gpus(index: int, count: int) -> dict[str, str]:
    """Each process its share of this machine's GPUs, unless the user has dealt them out."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    mine = [str(gpu) for gpu in range(there) if gpu * count // there == index]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}


SECONDS = 8  # that a child has to stop by itself
_SCRIPT = Path(__file__).with_name("keeper.sh")


class Keeper:
    """Ends a child whose parent is gone; begun before the child that it is for.

    A parent that is killed can do nothing for its children any more, and a child that compiles or
    is stopped does not look after itself. A small shell waits beside the child, at a pipe whose
    other end is the parent's alone. The system closes that when the parent ends, on Linux and macOS
    alike. The shell then asks the child's process group to stop, so that a training saves if there
    is time, and kills what is left of it.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", str(_SCRIPT), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of a terminal are not for it
        )

    def watch(self, group: int) -> None:
        """From now on this process group does not outlive its parent."""
        self._tell(f"{group}\n")

    def dismiss(self) -> None:
        """The child has ended, or was never started."""
        self._tell("end\n")
        with contextlib.suppress(OSError):
            assert self._shell.stdin is not None
            self._shell.stdin.close()
        self._shell.wait()

    def _tell(self, text: str) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the shell was killed; it is closed
            self._shell.stdin.write(text.encode())
            self._shell.stdin.flush()
