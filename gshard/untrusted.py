"""Files, folders and text that others may have made.

A file may be a pipe that nobody writes to, JSON may be nested too deeply to be read, a name may
hold what steers a terminal, and a link may stand where a folder is expected. Everything here ends
in a value or in an OSError or ValueError of one line.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist = 4, 12, 12
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 120
_DIGITS = 40  # of an integer: transformers writes 10**30 for a length without a limit


def refuse_special(path: Path) -> None:
    """An OSError for a pipe or a device, which may never end, and for a folder."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.ENXIO, "is not a regular file", str(path))


def read_bytes(path: Path, most: int = -1) -> bytes:
    """The bytes of a regular file, at most so many."""
    refuse_special(path)
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        return file.read(most)


def read_text(path: Path) -> str:
    """The text of a regular file."""
    return read_bytes(path).decode("utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a ValueError if it holds anything else."""
    text = read_text(path)
    try:
        found = json.loads(text, parse_int=_integer)
        if "\\ud" in text.lower():  # as in "\ud83d\ude00"; half of a pair is no text
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def own_folder(path: Path) -> int:
    """A descriptor of a folder that only this user can write to, which is made if it is missing.

    An OSError if it is a link, or if others can write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        refuse_of_others(path, os.fstat(folder))
    except OSError:
        os.close(folder)
        raise
    return folder


def refuse_of_others(path: Path, found: os.stat_result) -> None:
    """An OSError for what other users than this one and root can write to."""
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    if found.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "can be written to by others (`chmod go-w` ends that)", str(path)
        )


def printable(text: str) -> str:
    """The text with what no terminal and no UTF-8 file should see spelt out, as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """The same of a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def short_repr(value: Any) -> str:
    """A value of a file for an error: one line of bounded length, however large or nested it is."""
    return _SHORT.repr(value)
