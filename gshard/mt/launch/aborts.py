"""A sentence in place of a C++ trace, where JAX aborts a process because another one is gone.

JAX calls `abort` from a thread of its own when the coordination service, or process 0 with it, is
lost. That is no exception, and JAX's callback for it does not reach Python. So what C++ code writes
to standard error goes to a file first, which a thread reads and passes on (a pipe could fill up
while C++ code keeps Python waiting), and `abort` calls a function here, which reads the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

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


def explain(told: Callable[[str], str | None], status: int) -> None:
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
