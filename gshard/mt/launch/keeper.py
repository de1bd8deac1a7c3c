"""Ends a child whose parent is gone, however the parent was ended.

A parent that is killed can do nothing for its children any more, and a child that compiles or is
stopped does not look after itself. A small shell waits beside the child, at a pipe whose other end
is the parent's alone. The system closes that when the parent ends, on Linux and macOS alike. The
shell then asks the child's process group to stop, so that a training saves if there is time, and
kills what is left of it.
"""

from __future__ import annotations

import contextlib
import subprocess

SECONDS = 8  # that a child has to stop by itself

_SCRIPT = f"""
trap '' HUP INT TERM
read -r group || exit 0
read -r word && exit 0
kill -s TERM -- "-$group"
second=0
while [ $second -lt {SECONDS} ]; do
    sleep 1
    kill -s 0 -- "-$group" || exit 0
    second=$((second + 1))
done
kill -s KILL -- "-$group"
"""


class Keeper:
    """Waits for the end of the process that makes it; begun before the child that it is for."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
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
