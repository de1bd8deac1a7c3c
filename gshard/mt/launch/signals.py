"""Signals at which a training saves and stops, and processes that only its owner stops."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

    SIGTERM is what clusters send some time before they take a machine away. A signal that is
    ignored stays ignored: SIGHUP under `nohup`, Ctrl-C in the background of a shell.
    """
    return [each for each in _STOPPING if signal.getsignal(each) not in (signal.SIG_IGN, None)]


def is_second_request(number: int) -> bool:
    """Whether this signal, after another, means to stop at once.

    A shell and the system both send SIGHUP when a terminal is closed: that is one request.
    """
    return number != signal.SIGHUP


def belong_to_parent() -> None:
    """For a worker: its parent alone decides when it stops.

    Terminals and clusters send signals to all processes of a group, and a training that saves may
    need its workers until then.
    """
    for each in _STOPPING:
        signal.signal(each, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """For a worker: it ends when its parent has, also when that was killed and could not say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_too() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_too, name="parent", daemon=True).start()
