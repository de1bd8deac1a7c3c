"""Whether `gshard.prove` refutes a mutant, from shapes alone, and names the line that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.mutations import Mutation
from tools.mutants.swapping import functions_of, swaps
from tools.mutants.warm import Children, Work

_SECONDS = 60.0  # processor time for a mutant
_SHOWN = 2  # programs in which a mutant is refuted before the others are left out

Say = Callable[[str], None]


def run(root: Path, folder: Path, mutations: Sequence[Mutation], jobs: int, say: Say) -> None:
    """For every mutant: the programs in which it is refuted, and those whose line is named."""
    import gshard
    from tools.mutants.programs import about  # gshard is imported in this process from here on

    assert hasattr(gshard, "prove"), "this gshard has no prove"
    functions, done = functions_of(root), results(folder)

    def work(mutation: Mutation, found: Sequence[Any]) -> Work:
        def child(out: Path) -> None:
            import jax

            from gshard.tensors import padding
            from tests.conftest import poison

            padding.garbage = poison  # as in the tests: what leaks shows
            jax.config.update("jax_num_cpu_devices", 8)
            for function, code in found:
                function.__code__ = code
            shown = 0
            for program in about(mutation.file):
                refuted = _refuted(program) if shown < _SHOWN else None
                if refuted is not None:
                    shown += 1
                    line = {"program": program.name, "named": refuted}
                    with out.open("a") as file:
                        print(json.dumps(line), file=file)

        return child

    todo = [m for m in mutations if m.key not in done]
    jobs_of = ((m, work(m, found)) for m in todo if (found := swaps(m, root, functions)))
    for mutation, lines, _, used in Children(jobs, _SECONDS).map(jobs_of, folder / "children"):
        named = [line["program"] for line in lines if line["named"]]
        shown = [line["program"] for line in lines]
        with (folder / "named.jsonl").open("a") as file:
            print(json.dumps({"key": mutation.key, "shown": shown, "named": named}), file=file)
        say(f"{mutation.name}: refuted in {shown}, named in {named} ({used:.0f} s)")


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """For every mutation that was run, by its key."""
    store = folder / "named.jsonl"
    lines = store.read_text().splitlines() if store.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def _refuted(program: Any) -> bool | None:
    """Whether the first value that differs is that of the marked line; None if none differs."""
    import gshard

    try:
        report = gshard.prove(program.function, *program.arguments, devices=8, **program.keywords)
    except Exception:  # the mutant is noticed without a proof
        return None
    if report.first is None:
        return None
    file, _, line = report.first.source.rpartition(":")
    return Path(file).name == "programs.py" and int(line) in program.lines
