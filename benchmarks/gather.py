"""One corpus gathered by one process, and by one and four workers of Ray: bytes and memory.

    python -m benchmarks.gather --languages 4 16 --pairs 20000

For each number of languages made-up text is gathered in three ways, all of which have to write the
same bytes. Prints the time, and the most memory that the command and any one of its workers took.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GATHER = [sys.executable, "-m", "gshard.cli", "data", "gather", "--no-clean"]
WAYS = {
    "one process": ["--jobs", "1"],
    "Ray, 1 worker": ["--ray", "--jobs", "1"],
    "Ray, 4 workers": ["--ray", "--jobs", "4"],
}


def write_text(path: Path, language: int, pairs: int) -> None:
    """Made-up pairs of one language, each twice; the English is in all of them."""
    with path.open("w", encoding="utf-8") as file:
        for number in [*range(pairs // 2)] * 2:
            draw = random.Random(number)
            words = [f"w{draw.randrange(20_000)}" for _ in range(8)]
            there = " ".join(f"{word}x{language}" for word in words)
            file.write(f"{code(language)}\t{there}\t{' '.join(words)}\n")


def code(language: int) -> str:
    """A code of three letters."""
    return "q" + chr(97 + language // 26) + chr(97 + language % 26)


def peaks(command: list[str]) -> tuple[float, float, float]:
    """Seconds, and the largest memory in MB of a command and of any process that it started."""
    began, own, workers = time.monotonic(), 0.0, 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        for pid in descendants(process.pid):
            workers = max(workers, megabytes(pid, b"ray::"))
        own = max(own, megabytes(process.pid, b""))
        time.sleep(0.1)
    assert process.stderr is not None
    if process.returncode:
        sys.exit(process.stderr.read().decode())
    return time.monotonic() - began, own, workers


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    children = [int(child) for child in text.split()]
    return children + [each for child in children for each in descendants(child)]


def megabytes(pid: int, begins: bytes) -> float:
    """The most memory that a process took so far, if its command line begins like that."""
    try:
        if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(begins):
            return 0.0
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) / 1024 if found else 0.0


def contents(folder: Path) -> dict[str, bytes]:
    """All that a gathering wrote, by name."""
    places = [*folder.glob("corpus-*/**/*.parquet"), folder / "manifest.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in places}


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--languages", type=int, nargs="+", default=[4, 16])
    options.add_argument("--pairs", type=int, default=20_000, help="of each language")
    given = options.parse_args()
    print(f"{'languages':>9} {'pairs':>9}  {'':14} {'seconds':>7} {'command':>9} {'a worker':>9}")
    for count in given.languages:
        with tempfile.TemporaryDirectory() as scratch:
            texts = [Path(scratch) / f"{language}.tsv" for language in range(count)]
            for language, path in enumerate(texts):
                write_text(path, language, given.pairs)
            own = [word for path in texts for word in ("--tsv", str(path))]
            expected = None
            for way, settings in WAYS.items():
                out = Path(scratch) / way
                seconds, mine, workers = peaks([*GATHER, *own, "--out", str(out), *settings])
                expected = expected or contents(out)
                assert contents(out) == expected, f"{way} wrote something else"
                worker = f"{workers:.0f} MB" if workers else "-"
                total = f"{count:9} {count * given.pairs:9,}"
                print(f"{total}  {way:14} {seconds:7.0f} {mine:6.0f} MB {worker:>9}", flush=True)
    print("the same bytes each time")


if __name__ == "__main__":
    main()
