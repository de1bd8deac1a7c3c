"""Whether `gshard.check` names the line of a mutant: in programs whose wrong line is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.mutations import Mutation
from tools.mutants.swapping import functions_of, swaps
from tools.mutants.warm import Children, Work

_SECONDS = 60.0  # processor time for a mutant
_SHOWN = 3  # programs in which a mutant has to show before the others are left out

Say = Callable[[str], None]


def run(root: Path, folder: Path, mutations: Sequence[Mutation], jobs: int, say: Say) -> None:
    """For every mutant: the programs that it makes wrong, and those whose line is named."""
    import gshard
    from tools.mutants.programs import about  # gshard is imported in this process from here on

    assert hasattr(gshard, "check"), "this gshard has no check"
    functions, done = functions_of(root), results(folder)

    def work(mutation: Mutation, found: Sequence[Any]) -> Work:
        def child(out: Path) -> None:
            import jax

            from gshard.tensors import padding
            from tests.conftest import poison

            padding.garbage = poison  # as in the tests: what leaks shows
            jax.config.update("jax_num_cpu_devices", 8)
            jax.config.update("jax_disable_most_optimizations", True)
            programs = about(mutation.file)
            wanted = {p.name: _result(jax.jit(p.function), p.arguments) for p in programs}
            for function, code in found:
                function.__code__ = code
            shown = 0
            for program in programs:
                if shown < _SHOWN and _is_wrong(program, wanted[program.name]):
                    shown += 1
                    line = {"program": program.name, "named": _is_named(program)}
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
        say(f"{mutation.name}: wrong in {shown}, named in {named} ({used:.0f} s)")


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """For every mutation that was run, by its key."""
    store = folder / "named.jsonl"
    lines = store.read_text().splitlines() if store.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def _result(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    import jax
    import numpy as np

    return [np.asarray(x) for x in jax.tree.leaves(function(*arguments))]


def _is_wrong(program: Any, wanted: Sequence[Any]) -> bool:
    """Whether the partitioned program runs and gives other values."""
    import numpy as np

    import gshard

    try:
        got = _result(gshard.jit(program.function, **program.keywords), program.arguments)
    except Exception:  # the mutant is noticed without a check
        return False
    alike = [np.allclose(a, b, 1e-4, 1e-4, True) for a, b in zip(got, wanted, strict=True)]
    return not all(alike)


def _is_named(program: Any) -> bool:
    """Whether the first value that differs is that of the marked line."""
    import gshard

    try:
        report = gshard.check(program.function, *program.arguments, devices=8, **program.keywords)
    except Exception:
        return False
    if report.ok or report.first is None:
        return False
    file, _, line = report.first.source.rpartition(":")
    return Path(file).name == "programs.py" and int(line) in program.lines
