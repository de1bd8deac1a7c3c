"""Whether `gshard.prove` refutes a mutant, from shapes alone, and names the line that is wrong.

The programs of `of_rows`, `of_sums`, `of_rare` and `drawn` are proved once without a mutation,
which records the blocks of the partitioner that each executes; a mutant meets those that execute
its block.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.blocks import Blocks, load
from tools.mutants.mutations import KINDS, Mutation
from tools.mutants.swapping import functions_of, swaps
from tools.mutants.touched import Recorded, lines_of, partitioner
from tools.mutants.warm import Children, Work, apart

_FOUND = ("named", "refuted", "raised")
_LONGER = 40  # processor seconds beyond the limit after which a proof hangs

Say = Callable[[str], None]


def run(
    root: Path, folder: Path, mutations: Sequence[Mutation], jobs: int, seconds: float, say: Say
) -> None:
    """For every mutant: the programs in which it is refuted, and those whose line is named."""
    programs = folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    apart(lambda: _record(root, programs, jobs, say))
    recorded = Recorded(programs)

    def left() -> list[Mutation]:
        known = results(folder)
        return [m for m in mutations if m.key not in known]

    def names(mutation: Mutation) -> list[str]:
        """The programs that execute what a mutation changes: quick ones, of many kinds, first."""
        met: Counter[str] = Counter()
        turns = []
        for test in recorded.ranked(mutation):
            family = test.name.split()[0]
            turns.append((met[family], test.name))
            met[family] += 1
        return [name for _, name in sorted(turns, key=lambda each: each[0])]

    def keep(work: Iterable[tuple[Mutation, Work]]) -> None:
        found = Children(jobs, seconds + _LONGER).map(work, folder / "children")
        for mutation, lines, how, used in found:
            by = {kind: [x["program"] for x in lines if x["found"] == kind] for kind in _FOUND}
            ran = {"met": sum(x["found"] == "met" for x in lines), "of": len(names(mutation))}
            with (folder / "named.jsonl").open("a") as file:
                line = {"key": mutation.key, "name": mutation.name, "how": how, **by, **ran}
                print(json.dumps(line | {"seconds": round(used, 1)}), file=file)
            what = ", ".join(f"{kind} in {each}" for kind, each in by.items() if each)
            say(f"{mutation.name}: {what or 'right'}, {ran['met']} of {ran['of']} ({used:.0f} s)")

    def in_place() -> None:
        _corpus()  # gshard is imported in this process
        functions = functions_of(root)
        pairs = ((m, swaps(m, root, functions)) for m in left())
        keep((m, _swapped(m, names(m), seconds, found)) for m, found in pairs if found)

    apart(in_place)
    keep((m, _imported(root, m, names(m), seconds)) for m in left())
    say(summary(mutations, results(folder)))


def _corpus() -> dict[str, Any]:
    from tools.mutants import of_rare, of_rows, of_sums  # noqa: F401  programs of their own
    from tools.mutants.drawn import drawn
    from tools.mutants.programs import PROGRAMS

    return {program.name: program for program in (*PROGRAMS, *drawn())}


def _record(root: Path, folder: Path, jobs: int, say: Say) -> None:
    """Prove all programs as the partitioner is, each in a process of its own; once."""
    blocks = Blocks(root, partitioner(root))
    sources = {file: (root / file).read_text() for file in blocks.codes}
    load(root, blocks.codes, blocks.hit)
    corpus, store, kept = _corpus(), folder / "touched.jsonl", folder / "sources.json"
    if store.exists() and json.loads(kept.read_text())[1] != sources:
        store.unlink()  # blocks have other numbers
    kept.write_text(json.dumps([blocks.spans, sources]))
    done = {json.loads(line)["file"] for line in lines_of(store)}

    def work(program: Any) -> Work:
        def child(out: Path) -> None:
            _begin()
            blocks.hit.clear()
            begun = time.process_time()
            found = _found(program)
            line = {"test": program.name, "seconds": time.process_time() - begun, "found": found}
            _append(out, line | blocks.note())

        return child

    todo = [program for name, program in corpus.items() if name not in done]
    children = Children(jobs, 120).map(((p, work(p)) for p in todo), folder / "children")
    for program, lines, how, used in children:
        found = lines[0]["found"] if lines else how
        if found:
            say(f"{program.name} is {found} without a mutation, and left out ({used:.0f} s)")
        _append(store, {"file": program.name, "tests": [] if found else lines})
    say(f"{len(corpus)} programs are recorded, {len(todo)} of them now")


def _swapped(
    mutation: Mutation, names: Sequence[str], seconds: float, found: Sequence[Any]
) -> Work:
    def child(out: Path) -> None:
        for function, code in found:
            function.__code__ = code
        _prove(mutation, names, seconds, out)

    return child


def _imported(root: Path, mutation: Mutation, names: Sequence[str], seconds: float) -> Work:
    def child(out: Path) -> None:
        path = root / mutation.file
        text = mutation.applied(path.read_text())
        assert text is not None
        load(root, {mutation.file: compile(text, str(path), "exec", dont_inherit=True)})
        try:
            _prove(mutation, names, seconds, out)
        except Exception:
            _append(out, {"program": "import", "found": "raised"})

    return child


def _begin() -> None:
    import jax

    from gshard.tensors import padding
    from tests.conftest import poison

    padding.garbage = poison  # as in the tests: what leaks shows
    jax.config.update("jax_num_cpu_devices", 8)


def _prove(mutation: Mutation, names: Sequence[str], seconds: float, out: Path) -> None:
    """The programs in which this process's gshard is refuted, until one is by its line.

    Those that were written for this mutation come first.
    """
    corpus = _corpus()
    _begin()
    until = time.process_time() + seconds
    for name in sorted(names, key=lambda name: mutation.name not in corpus[name].shows):
        found = _found(corpus[name])
        _append(out, {"program": name, "found": "met"})
        if found:
            _append(out, {"program": name, "found": found})
        if found == "named" or time.process_time() > until:
            break


def _found(program: Any) -> str:
    """Whether the first value that differs is "named" by its line, or "refuted", or nothing is."""
    import gshard

    try:
        function, arguments, keywords = program.make()
        report = gshard.prove(function, *arguments, **{"devices": 8, **keywords})
    except Exception:  # the mutant is noticed without a proof
        return "raised"
    if report.first is None:
        return ""
    file, _, line = report.first.source.rpartition(":")
    here = Path(file).name == Path(program.file).name and int(line) in program.lines
    return "named" if here else "refuted"


def summary(mutations: Sequence[Mutation], known: dict[str, dict[str, Any]]) -> str:
    """How many are refuted, and by their line; what the others do, by kind."""
    ran = {m: known[m.key] for m in mutations if m.key in known}
    refuted = [m for m, found in ran.items() if found["named"] or found["refuted"]]
    raises = [m for m, found in ran.items() if m not in refuted and found["raised"]]
    ended = [m for m, found in ran.items() if found["how"] != "ended"]
    same = [m for m in ran if m not in refuted and m not in raises and m not in ended]
    lines = [
        f"{len(ran)} mutants of {len(mutations)} were run: "
        f"{len(refuted)} refuted, {sum(bool(ran[m]['named']) for m in refuted)} by their line; "
        f"{len(raises)} raise an error, {len(set(ended) - set(refuted) - set(raises))} hang",
        f"{len(same)} leave all values of these programs right:",
    ]
    for kind in KINDS:
        names = [f"{m.name} ({ran[m]['met']} of {ran[m]['of']})" for m in same if m.kind == kind]
        lines += [f"  {kind}: {', '.join(sorted(names))}"] if names else []
    return "\n".join(lines)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """For every mutation that was run, by its key."""
    store = folder / "named.jsonl"
    return {line["key"]: line for line in map(json.loads, lines_of(store))}


def _append(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        print(json.dumps(line), file=file)
