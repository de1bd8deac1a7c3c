"""`python -m tools.hygiene FILE ...`: what no file of the repository should have in it.

Whitespace at the end of a line, a missing newline at the end of the file, marks of a conflict,
files of more than half a megabyte, and phrases that readers do not understand (`tools.words`).
Without arguments: every file that git knows.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools import words

MOST_BYTES = 500_000
CONFLICT = re.compile(r"^(<{7}|>{7})( |$)", re.MULTILINE)


def problems(path: Path) -> list[str]:
    """What is wrong with a file, in words."""
    content = path.read_bytes()
    found = []
    if len(content) > MOST_BYTES:
        found.append(f"{len(content):,} bytes, more than {MOST_BYTES:,}")
    if b"\0" in content:  # an image
        return found
    text = content.decode()
    if text and not text.endswith("\n"):
        found.append("no newline at its end")
    if text.endswith("\n\n"):
        found.append("empty lines at its end")
    if re.search(r"[ \t]+$", text, re.MULTILINE):
        found.append("whitespace at the end of a line")
    if CONFLICT.search(text):
        found.append("marks of a conflict")
    if words.is_read(path):
        found += words.phrases(path)
    return found


def main() -> None:
    """Print the problems of the given files; fail if there are any."""
    names = sys.argv[1:]
    if not names:
        listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
        names = listed.stdout.splitlines()
    failed = False
    for name in names:
        for problem in problems(Path(name)):
            print(f"{name}: {problem}")
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
