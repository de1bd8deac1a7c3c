"""`python -m gshard.recording FOLDER`: who waits where, and for whom."""

from __future__ import annotations

import sys
from pathlib import Path

from gshard.recording.reading import by_run, read, standstill
from gshard.recording.writing import VARIABLE, folder


def main() -> None:
    """Print who waits where."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else folder()
    if place is None or not place.is_dir():
        sys.exit(f"gshard: {place or 'no folder'}: give the folder that {VARIABLE} names")
    runs = by_run(read(place))
    for run, positions in runs.items():
        words = standstill(positions) or "no process has entered a collective yet"
        print(f"run {run}: {words}" if len(runs) > 1 else words)
    if not runs:
        print("no process has entered a collective yet")


if __name__ == "__main__":
    main()
