"""`python -m tools.reproduce`: run the commands of docs/results/paper.md, and time them.

    python -m tools.reproduce                  the rows, each with its command
    python -m tools.reproduce --run layer      run the commands that contain "layer"
    python -m tools.reproduce --run layer --update    and write how long they took to the page

What is written is processor time, of all processes of a command, so that a busy machine gives the
same figures as an idle one. Commands whose "takes" names a GPU are run only on a machine with one.
"""

from __future__ import annotations

import argparse
import re
import resource
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "paper.md"


@dataclass(frozen=True)
class Row:
    """A row of the page: the claim, the command, how long it takes, and the two last columns."""

    line: str

    @property
    def cells(self) -> list[str]:
        """The columns."""
        return [cell.strip() for cell in self.line.strip("|").split(" | ")]

    @property
    def command(self) -> str | None:
        """The command; None for "as above"."""
        found = re.fullmatch(r"`(.*)`", self.cells[1])
        return found[1] if found else None

    @property
    def needs_gpu(self) -> bool:
        """Whether it is timed on a GPU."""
        return "H200" in self.cells[2]

    def with_time(self, takes: str) -> str:
        """The row with another "takes"."""
        cells = self.cells
        cells[2] = takes
        return f"| {' | '.join(cells)} |"


def rows(text: str) -> list[Row]:
    """The rows of all tables of the page, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [Row(line) for line in lines if not line.startswith(("| claim", "|---"))]


def seconds_of(command: str) -> float:
    """Run a command from the root of the repository; its processor time."""
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    elif words[0] in ("pytest", "gshard"):
        words[:1] = [sys.executable, "-m", "pytest" if words[0] == "pytest" else "gshard.cli"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def shown(seconds: float) -> str:
    """Processor time as the page gives it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def main() -> None:
    """List, run or update."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", metavar="WORD", help="run the commands that contain this")
    parser.add_argument("--update", action="store_true", help="write the times to the page")
    given = parser.parse_args()
    found = rows(PAGE.read_text())
    if given.run is None:
        for row in found:
            print(f"{row.cells[2]:<45}  {row.command or row.cells[1]}")
        return
    commands = {r.command for r in found if r.command and not r.needs_gpu}
    for command in sorted(c for c in commands if given.run in c):
        takes = shown(seconds_of(command))
        print(f"{command}: {takes} of processor time", flush=True)
        if given.update:
            text = PAGE.read_text()
            for row in rows(text):
                if row.command == command:
                    text = text.replace(row.line, row.with_time(takes))
            PAGE.write_text(text)


if __name__ == "__main__":
    main()
