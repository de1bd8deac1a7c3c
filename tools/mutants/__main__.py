"""`python -m tools.mutants`: mutants of the partitioner, and the quick tests that kill them.

The first run records which test executes what (a run of all quick tests of the partitioner); the
mutants follow. It may be interrupted at any time, and goes on where it stopped. Nothing is written
to the checkout but docs/results/mutants.md, with `--report`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

from tools.mutants import mutations, naming, report, running, touched, warm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "mutants.md"


def main() -> None:
    """Record, run the mutants, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="mutations with one of these texts, a,b, in name or file"
    )
    parser.add_argument(
        "--tests", nargs="*", default=[], help="files of tests, in place of those that are recorded"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=60, help="processor time for a mutant")
    parser.add_argument("--again", action="store_true", help="forget the results of these mutants")
    parser.add_argument("--record", action="store_true", help="record anew what tests execute")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument(
        "--confirm", action="store_true", help="run the tests that killed without any mutation, too"
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="see which ones gshard.prove refutes, from shapes alone, and whose line it names",
    )
    parser.add_argument("--list", action="store_true", help="print the mutations and their results")
    parser.add_argument("--report", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    known = mutations.load()
    texts = options.only.split(",")
    chosen = [m for m in known if any(text in m.name or text in m.file for text in texts)]
    if not chosen:
        sys.exit(f"gshard: no mutation has {options.only!r} in its name or file")
    old = {m.name for m in mutations.stale(known, ROOT)}
    for name in sorted(old):
        print(f"{name} does not fit its file any more", flush=True)
    chosen = [m for m in chosen if m.name not in old]
    random.Random(0).shuffle(chosen)  # a part of a run says something about all kinds
    if options.list:
        print(report.listed(sorted(chosen, key=known.index), running.results(options.folder)))
    elif options.prove:
        warm.warm_up(ROOT)
        wrong = [m for m in chosen if not m.unchanged]
        naming.run(ROOT, options.folder, wrong, options.jobs, options.seconds, _say)
    elif not options.report:
        _run(options, chosen)
    if options.report:
        PAGE.write_text(report.page([m for m in known if m.name not in old], options.folder))
    if old:
        sys.exit(1)


def _say(text: str) -> None:
    print(text, flush=True)


def _run(options: argparse.Namespace, chosen: list[mutations.Mutation]) -> None:
    folder, jobs, say = options.folder, options.jobs, _say
    warm.warm_up(ROOT)
    if options.record:
        (folder / "touched.jsonl").unlink(missing_ok=True)
    if options.again:
        running.forget(folder, chosen)

    def left() -> list[mutations.Mutation]:
        known = running.results(folder)
        return [m for m in chosen if m.key not in known]

    try:
        recorded = None
        if not options.tests:
            warm.apart(lambda: touched.record(ROOT, folder, jobs, say))
            recorded = touched.Recorded(folder)
        runner = running.Runner(ROOT, folder, recorded, jobs, options.seconds, say, options.tests)
        warm.apart(lambda: runner.in_place(left()))
        runner.imported(left())
        if options.confirm:
            warm.apart(lambda: print(*runner.confirm(chosen), sep="\n"))
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        os._exit(130)
    say(report.summary(chosen, running.results(folder)))


if __name__ == "__main__":
    main()
