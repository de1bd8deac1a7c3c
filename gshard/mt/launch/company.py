"""The other processes of a command: whether they run the same, and which of them is gone.

All of it goes through JAX's coordination service, which process 0 has, beside the collectives of
the program. JAX itself says neither: it runs whatever each process has traced, and when one is gone
it ends the others from C++ code, a minute later.

Processes that trace different programs hang in their first collective, or train a wrong model.
Before they begin they compare versions, source files, switches of JAX and settings (`fingerprint`).

A sentence takes the place of a C++ trace where JAX aborts a process because another one is gone
(`explain_aborts`). JAX calls `abort` from a thread of its own when the coordination service, or
process 0 with it, is lost. That is no exception, and JAX's callback for it does not reach Python.
So what C++ code writes to standard error goes to a file first, which a thread reads and passes on
(a pipe could fill up while C++ code keeps Python waiting), and `abort` calls a function here, which
reads the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from gshard.errors import UserError

_AGREEING = 120.0  # seconds that processes wait for each other's words
_PARTING = 10.0  # seconds that those who end wait for the others, who may end as well
_LAST = 1.0  # seconds that process 0, which the others listen to, ends after them
_FOLDER, _ENDED = "gshard/agreed/", "gshard/ended/"
# What collectives and the coordination service say when a process is gone.
_MISSED = re.compile(
    r"\bgloo\b|\bnccl\b|connection (closed|reset|refused)|socket closed|heartbeat"
    r"|coordination.?service|\bUNAVAILABLE\b|\bDEADLINE_EXCEEDED\b",
    re.IGNORECASE,
)
_TASK = r"(?:\S*task:)?(\d+)"


class MissingHostsError(UserError):
    """Other processes of the run are not there; they may be when it is tried again."""

    status = 75  # "temporary failure" of sysexits.h


class NobodyCameError(MissingHostsError):
    """The same, while JAX still waits for them in a thread that cannot be ended."""

    at_once = True


class Company:
    """This process among those of its command; `client` is JAX's."""

    def __init__(self, client: Any, index: int, count: int):
        self._client, self._index, self._count = client, index, count
        self._rounds = itertools.count()  # the same one on every process
        self._names: dict[int, str] = {}

    def agree(self, mine: Mapping[str, str]) -> None:
        """An error on all processes if not all have the same; it names who differs, and where."""
        folder = f"{_FOLDER}{next(self._rounds)}/"
        try:
            apart = self._compared(folder, mine)
        except RuntimeError as error:
            missing = self._called(absent(str(error)) or [0])
            raise MissingHostsError(
                f"nothing was heard from {missing} within {_AGREEING:.0f} s; it has ended, or runs "
                "another version of gshard"
            ) from None
        if apart:
            lines = [f"{self._called([index])} {text}" for index, text in sorted(apart.items())]
            raise UserError(
                "not all processes run the same as process 0: in " + "; in ".join(lines)
            )

    def _compared(self, folder: str, mine: Mapping[str, str]) -> dict[int, str]:
        client, limit = self._client, int(1000 * _AGREEING)
        me = f"{os.getpid()} on {socket.gethostname()}"
        client.key_value_set(f"{folder}name/{self._index}", me)
        if self._index == 0:
            client.key_value_set(f"{folder}first", json.dumps(dict(mine)))
        else:
            first = json.loads(client.blocking_key_value_get(f"{folder}first", limit))
            if text := differences(mine, first):
                client.key_value_set(f"{folder}apart/{self._index}", text)
        client.wait_at_barrier(f"{folder}all", limit)
        self._names = self._all(f"{folder}name/")
        return self._all(f"{folder}apart/")

    def missed(self, error: BaseException) -> str | None:
        """Which process is gone, in a sentence, if `error` comes from that."""
        if not isinstance(error, (RuntimeError, ValueError)) or not _MISSED.search(str(error)):
            return None
        gone = self._wait_for_those_who_end()
        ended = self._all(_ENDED)
        if ended:
            index = min(ended)
            return f"{self._called([index])} has ended: {ended[index]}"
        return self.sentence(gone) if gone else None

    def sentence(self, gone: Sequence[int]) -> str:
        """That a process is gone, which is one of these."""
        some = "is gone" if len(gone) == 1 else "do not answer, and one of them at least is gone"
        return f"{self._called(gone)} {some}; this process cannot continue alone"

    def part(self, words: str) -> None:
        """This process ends with an error, which the others hear of."""
        with contextlib.suppress(RuntimeError):
            lines = words.strip().splitlines() or ["it does not say why"]
            self._client.key_value_set(f"{_ENDED}{self._index}", lines[-1][:300])
        self._wait_for_those_who_end()

    def _wait_for_those_who_end(self) -> list[int]:
        """Until all processes end, or for a while; those that did not come."""
        try:
            self._client.wait_at_barrier("gshard/end", int(1000 * _PARTING))
        except RuntimeError as error:
            gone = absent(str(error))
        else:
            gone = []
        if self._index == 0:
            time.sleep(_LAST)
        # Who waits for the one that is gone did not come either.
        return [i for i in gone if not self._is_here(i)] or gone

    def _is_here(self, index: int) -> bool:
        """Whether a process runs on this host."""
        process, _, host = self._names.get(index, "0 on ").partition(" on ")
        return host == socket.gethostname() and _runs(int(process))

    def _called(self, processes: Sequence[int]) -> str:
        names = [
            f"process {index}" + (f" ({self._names[index]})" if index in self._names else "")
            for index in processes[:5]
        ]
        more = len(processes) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def _all(self, folder: str) -> dict[int, str]:
        try:
            found = self._client.key_value_dir_get(folder)
        except RuntimeError:
            return {}
        return {int(key.rpartition("/")[2]): text for key, text in found}


def absent(text: str) -> list[int]:
    """The processes of which JAX's coordination service says that they are gone."""
    if listed := re.search(rf"(?:heartbeats\)|task names):\n((?:{_TASK}\n?)+)", text):
        return sorted(set(map(int, re.findall(r"(\d+)$", listed[1], re.MULTILINE))))
    if timed_out := re.findall(rf"task {_TASK} heartbeat timeout", text, re.IGNORECASE):
        return sorted(set(map(int, timed_out)))
    leader = re.search("leader task was preempted|Failed to send RPC to coordination", text)
    return [0] if leader else []


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_present: list[Company] = []


def join(company: Company) -> None:
    """From now on this process is one of several."""
    _present[:] = [company]


def current() -> Company | None:
    """The processes of this command; None if it is alone."""
    return _present[0] if _present else None


def explained(text: str) -> str | None:
    """A sentence for what JAX's coordination service says before it ends this process."""
    if twice := re.search(rf"{_TASK} unexpectedly tried to connect", text):
        return f"two processes say that they are process {twice[1]}, or it was started again alone"
    if unknown := re.search(rf"Unexpected task registered with (?:task=|task_name=)?{_TASK}", text):
        return (
            f"process 0 knows of no process {unknown[1]}: not all were told the same number of "
            "processes"
        )
    gone = absent(text)
    others = current() or Company(None, 0, 0)
    return others.sentence(gone) if gone else None


_PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "numpy", "equinox",
    "optax", "grain", "orbax-checkpoint", "sentencepiece",
)  # fmt: skip
# XLA's flags in which hosts may differ, since the program is the same.
_ONLY_FILES = ("--xla_dump", "--xla_gpu_per_fusion_autotune_cache_dir", "--xla_force_host")
_SOURCE = "source of "
_MOST = 3  # differing source files that are named


def fingerprint(switches: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, str]:
    """What this process runs, by name; `switches` are JAX's, `settings` the command's."""
    flags = sorted(os.environ.get("XLA_FLAGS", "").split())
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: version for name in _PACKAGES if (version := _version(name))},
        **_sources(),
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(_ONLY_FILES)),
        **{name: str(value) for name, value in switches.items()},
        **{name: str(value) for name, value in settings.items()},
    }


def differences(mine: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Where this process differs from the first one, in words; nothing if it does not."""
    apart = sorted(name for name in {**mine, **first} if mine.get(name) != first.get(name))
    files = [name for name in apart if name.startswith(_SOURCE)]
    parts = [
        f"{name} is {_shown(mine, name)} and not {_shown(first, name)}"
        for name in apart
        if name not in files
    ]
    parts += [f"the {name} is another" for name in files[:_MOST]]
    if len(files) > _MOST:
        parts.append(f"so are those of {len(files) - _MOST} more files")
    return ", ".join(parts)


def _shown(values: Mapping[str, str], name: str) -> str:
    return repr(value)[:100] if (value := values.get(name)) is not None else "missing"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _sources() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {
        f"{_SOURCE}{path.relative_to(root.parent)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*.py"))
    }


_LOOK = 0.2  # seconds between two looks at the file
_HELD = 10.0  # seconds that words of the coordination service are held back, for `abort` to come
_LARGE = 1 << 24  # bytes after which the file is restarted
_OURS = re.compile(rb"^[EF]\d{4} .*(coordination_service\w*\.cc|client\.h):\d+\]", re.MULTILINE)

_kept: list[Any] = []  # what C has pointers to


class _StandardError:
    """Standard error as C++ code has it, on its way to the terminal."""

    def __init__(self) -> None:
        self._file, path = tempfile.mkstemp(prefix="gshard-errors-")
        appending = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.unlink(path)
        self._terminal, self._lock = os.dup(2), threading.Lock()
        self._rest, self._held_since = b"", 0.0
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.flush()
        sys.stderr = os.fdopen(
            os.dup(2), "w", buffering=1, encoding=encoding, errors="backslashreplace"
        )
        os.dup2(appending, 2)
        os.close(appending)

    def pass_on(self, at_once: bool = False) -> None:
        """Write what has come to the terminal; words of the coordination service a little later."""
        with self._lock:
            while data := os.read(self._file, 1 << 16):
                self._rest += data
            if os.lseek(self._file, 0, os.SEEK_CUR) > _LARGE:
                os.ftruncate(self._file, 0)
                os.lseek(self._file, 0, os.SEEK_SET)
            found = None if at_once else _OURS.search(self._rest)
            if found and not self._held_since:
                self._held_since = time.monotonic()
            late = self._held_since and time.monotonic() - self._held_since > _HELD
            ready = found.start() if found and not late else len(self._rest)
            if late or not found:
                self._held_since = 0.0
            with contextlib.suppress(OSError):
                os.write(self._terminal, self._rest[:ready])
            self._rest = self._rest[ready:]

    def keep_passing_on(self) -> None:
        """Runs forever, in a thread."""
        while True:
            time.sleep(_LOOK)
            self.pass_on()

    def held(self) -> str:
        """What is held back and what has come since."""
        self.pass_on()
        return self._rest.decode("utf-8", "replace")

    def say(self, text: str) -> None:
        """Write a line to the terminal."""
        with contextlib.suppress(OSError):
            os.write(self._terminal, f"{text}\n".encode())


def explain_aborts(told: Callable[[str], str | None], status: int) -> None:
    """From now on an `abort` of which `told` makes a sentence is that sentence and this status."""
    try:
        errors = _StandardError()
    except OSError:  # no place for a file: JAX's own words have to do
        return
    libc = ctypes.CDLL(None)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)

    def aborted(number: int) -> None:
        sentence = told(errors.held())
        if sentence is not None:
            sys.stdout.flush()
            errors.say(f"gshard: {sentence}")
            os._exit(status)
        errors.pass_on(at_once=True)  # and the process is aborted, as without this

    handler = kind(aborted)
    _kept.append(handler)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, kind), ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
    atexit.register(errors.pass_on, at_once=True)
    threading.Thread(target=errors.keep_passing_on, name="errors", daemon=True).start()
