"""Whether `gshard.prove` refutes a mutant, from shapes alone, and names the line that is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.blocks import load
from tools.mutants.mutations import KINDS, Mutation
from tools.mutants.running import Runner
from tools.mutants.swapping import functions_of, swaps
from tools.mutants.warm import Children, Session, Work, apart

_SECONDS = 60.0  # processor time for a mutant
_SHOWN = 2  # programs in which a mutant is refuted before the others are left out
_FOUND = ("named", "refuted", "raised")

Say = Callable[[str], None]


def run(root: Path, folder: Path, mutations: Sequence[Mutation], jobs: int, say: Say) -> None:
    """For every mutant: the programs in which it is refuted, and those whose line is named."""

    def left() -> list[Mutation]:
        known = results(folder)
        return [m for m in mutations if m.key not in known]

    def in_place() -> None:
        import tools.mutants.programs  # noqa: F401  gshard is imported in this process

        functions = functions_of(root)
        pairs = ((m, swaps(m, root, functions)) for m in left())
        _keep(folder, jobs, ((m, _swapped(m, found)) for m, found in pairs if found), say)

    apart(in_place)
    _keep(folder, jobs, ((m, _imported(root, m)) for m in left()), say)
    say(summary(mutations, results(folder)))


def _keep(folder: Path, jobs: int, work: Iterable[tuple[Mutation, Work]], say: Say) -> None:
    for mutation, lines, how, used in Children(jobs, _SECONDS).map(work, folder / "children"):
        by = {kind: [x["program"] for x in lines if x["found"] == kind] for kind in _FOUND}
        shown = by["named"] + by["refuted"]
        kept = {"key": mutation.key, "shown": shown, "named": by["named"], "raised": by["raised"]}
        with (folder / "named.jsonl").open("a") as file:
            print(json.dumps(kept | {"how": how}), file=file)
        what = f"refuted in {shown}, named in {by['named']}, raises in {by['raised']}"
        say(f"{mutation.name}: {what} ({used:.0f} s)")


def _swapped(mutation: Mutation, found: Sequence[Any]) -> Work:
    def child(out: Path) -> None:
        for function, code in found:
            function.__code__ = code
        _prove(mutation, out)

    return child


def _imported(root: Path, mutation: Mutation) -> Work:
    def child(out: Path) -> None:
        path = root / mutation.file
        text = mutation.applied(path.read_text())
        assert text is not None
        load(root, {mutation.file: compile(text, str(path), "exec", dont_inherit=True)})
        try:
            _prove(mutation, out)
        except Exception:
            _append(out, {"program": "import", "found": "raised"})

    return child


def _prove(mutation: Mutation, out: Path) -> None:
    """The programs in which this process's gshard is refuted, until there are enough."""
    import jax

    from gshard.tensors import padding
    from tests.conftest import poison
    from tools.mutants.programs import about

    padding.garbage = poison  # as in the tests: what leaks shows
    jax.config.update("jax_num_cpu_devices", 8)
    shown = 0
    for program in about(mutation.file):
        found = _found(program)
        if found:
            shown += found != "raised"
            _append(out, {"program": program.name, "found": found})
        if found == "named" or shown == _SHOWN:
            break


def summary(mutations: Sequence[Mutation], known: dict[str, dict[str, Any]]) -> str:
    """How many are refuted, and by their line; what the others do, by kind."""
    ran = {m: known[m.key] for m in mutations if m.key in known}
    refuted = [m for m, found in ran.items() if found["shown"]]
    raises = [m for m, found in ran.items() if not found["shown"] and found.get("raised")]
    ended = [m for m, found in ran.items() if found.get("how", "ended") != "ended"]
    same = [m for m in ran if m not in refuted and m not in raises and m not in ended]
    by_kind = {kind: sorted(m.name for m in same if m.kind == kind) for kind in KINDS}
    lines = [
        f"{len(ran)} mutants of {len(mutations)} were run: "
        f"{len(refuted)} refuted, {sum(bool(ran[m]['named']) for m in refuted)} by their line; "
        f"{len(raises)} raise an error, {len(set(ended) - set(refuted) - set(raises))} hang",
        f"{len(same)} leave all values of these programs right:",
        *(f"  {kind}: {', '.join(names)}" for kind, names in by_kind.items() if names),
    ]
    return "\n".join(lines)


class Refuting(Runner):
    """Runs the recorded tests of a mutant until `gshard.check` refutes a call of one of them.

    A result's `by` is the line of the first value that differs.
    """

    def _test(self, session: Session, mutation: Mutation, out: Path) -> None:
        _check_every_call(out)
        tests = list(session.items) if self._tests else self._names(mutation)
        session.run(tests, out, until=time.process_time() + self._seconds, stop=False)


def _check_every_call(out: Path) -> None:
    import jax

    from gshard.jit import Jitted

    call = Jitted.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        first = None
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            with contextlib.suppress(Exception):  # what cannot be lowered is noticed by the call
                first = self.lower(*args, **kwargs).check(*args, **kwargs).first
        if first is not None:
            _append(out, {"failed": first.source or first.operator})
            os._exit(0)
        return call(self, *args, **kwargs)

    # A mutant's own process, which ends with its tests: nothing has to be put back.
    Jitted.__call__ = checked  # type: ignore[method-assign]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """For every mutation that was run, by its key."""
    store = folder / "named.jsonl"
    lines = store.read_text().splitlines() if store.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def _append(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        print(json.dumps(line), file=file)


def _found(program: Any) -> str:
    """Whether the first value that differs is "named" by its line, or "refuted", or nothing is."""
    import gshard

    try:
        report = gshard.prove(program.function, *program.arguments, devices=8, **program.keywords)
    except Exception:  # the mutant is noticed without a proof
        return "raised"
    if report.first is None:
        return ""
    file, _, line = report.first.source.rpartition(":")
    here = Path(file).name == "programs.py" and int(line) in program.lines
    return "named" if here else "refuted"
