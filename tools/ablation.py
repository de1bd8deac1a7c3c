"""`python -m tools.ablation`: what each mechanism of the partitioner saves, by doing without it.

A mechanism is a row of `ablation.toml`: the files and functions that would go, and how it is left
out while they are still there: functions whose bodies become another statement ("does not apply"),
or texts that become others. All programs are lowered once as they are, which also finds out what
each executes, and for every mechanism those that execute any of it, in a process that imports the
package without it. Planned bytes are emitted bytes: nothing is compiled or run.

    python -m tools.ablation --jobs 16            all of it; interrupted, it goes on where it was
    python -m tools.ablation --only ring,fold     some mechanisms
    python -m tools.ablation --random 0           no random programs, and no large recipes
    python -m tools.ablation --more FILE          and the programs of `cases()` in a Python file

The table at the end is that of docs/design/ablation.md. `cases()` yields names, functions,
arguments and devices, as that of `benchmarks.census` does, or keywords of `gshard.jit` in place of
the devices.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import runpy
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from tools.mutants.blocks import Blocks, load
from tools.mutants.touched import lines_of, partitioner
from tools.mutants.warm import Children, warm_up

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_suffix(".toml")
_LONGEST = 1800.0  # processor seconds of a process
Rows = dict[str, dict[str, Any]]  # what each program came to


@dataclass(frozen=True)
class Mechanism:
    """What would go, as `file` or `file:function`, and how to do without it.

    `off` has the statements that replace the bodies of functions, `edits` texts of files that
    become others. Where a program executes these without the mechanism doing anything, `at` is a
    text of a file that is executed only if it does.
    """

    name: str
    what: str
    goes: Sequence[str]
    off: Mapping[str, str] = field(default_factory=dict)
    edits: Sequence[tuple[str, str, str]] = ()
    at: tuple[str, str] | tuple[()] = ()

    def lines(self, root: Path) -> int:
        """The lines that would go, with the decorators of functions and the blank lines between."""
        total = 0
        for place in self.goes:
            file, _, name = place.partition(":")
            text = (root / "gshard" / file).read_text()
            if not name:
                total += len(text.splitlines())
                continue
            node = function(ast.parse(text), name)
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            total += (node.end_lineno or first) - first + 3 - node.col_offset // 4
        return total

    def places(self, root: Path) -> list[tuple[str, int]]:
        """The files and lines at which it is left out, or at which it does something."""
        found = []
        for place in self.off:
            file, _, name = place.partition(":")
            found.append((file, function(parsed(root, file), name).body[0].lineno))
        for file, old, *_ in (*self.edits, *([self.at] if self.at else ())):
            text = (root / "gshard" / file).read_text()
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} is not in {file}, or twice")
            found.append((file, text[: text.index(old)].count("\n") + 1))
        return [(f"gshard/{file}", line) for file, line in (found[-1:] if self.at else found)]

    def codes(self, root: Path) -> dict[str, CodeType]:
        """The files as they are without it."""
        texts: dict[str, str] = {}
        for file, old, new in self.edits:
            texts[file] = texts.get(file, (root / "gshard" / file).read_text()).replace(old, new)
        trees = {file: ast.parse(text) for file, text in texts.items()}
        for place, statement in self.off.items():
            file, _, name = place.partition(":")
            tree = trees.setdefault(file, parsed(root, file))
            function(tree, name).body = ast.parse(statement).body
        return {
            f"gshard/{file}": compile(tree, str(root / "gshard" / file), "exec", dont_inherit=True)
            for file, tree in trees.items()
        }


def parsed(root: Path, file: str) -> ast.Module:
    """A file of the package."""
    return ast.parse((root / "gshard" / file).read_text())


def function(tree: ast.Module, name: str) -> Any:
    """The function, or class, of this name, with that of its class before a dot."""
    body: Sequence[ast.stmt] = tree.body
    for part in name.split("."):
        named = [node for node in body if getattr(node, "name", None) == part]
        if not named:
            raise ValueError(f"there is no {name}")
        body = named[0].body  # type: ignore[attr-defined]  # ast.AST: only definitions match
    return named[0]


def mechanisms(data: Path = DATA) -> list[Mechanism]:
    """All mechanisms."""
    return [Mechanism(name, **row) for name, row in tomllib.loads(data.read_text()).items()]


# ---------------------------------------------------------------- programs


def cases(random: int, more: Sequence[Path]) -> Iterator[tuple[str, Any, Any, Any]]:
    """The programs: those of the census, models of `gshard.nn`, pipelines, and others given."""
    import jax

    from benchmarks import census, pipelines
    from gshard.nn import FAMILY, adafactor, init_state, train_step
    from tools import ablation_programs

    yield from (case for case in census.cases(random or 1) if random or case[0] != "random 0")
    key, optimizer = jax.eval_shape(lambda: jax.random.key(0)), adafactor()
    for name, changes in (("moe_128e_12l", {"remat": "layer"}), ("moe_128e_12l", {})):
        model = FAMILY[name].replace(encoder_layers=2, decoder_layers=2, **changes)
        state = jax.eval_shape(lambda key, c=model.config: init_state(c, optimizer, key), key)

        def step(state: Any, batch: Any, key: Any, strategy: Any = model.strategy) -> Any:
            return train_step(state, batch, key, optimizer=optimizer, strategy=strategy)

        yield f"{name} {changes or ''}".strip(), step, (state, model.batch, key), model.devices
    for name in ("gpipe", "1f1b", "zb-h1"):
        arguments = pipelines.shapes(pipelines.SMALL, pipelines.SMALL.L)
        yield f"pipeline, {name}", pipelines.step_of(4, 8, name), arguments, 4
    for recipe in [r for r in census.recipes(census.SMALL) if r.name.startswith("context")]:
        yield f"{recipe.name}, in little memory", recipe.step, recipe.arguments, {"memory_limit": 1}
    yield from ablation_programs.cases()
    for path in more:
        yield from runpy.run_path(str(path))["cases"]()


def lower(chosen: Callable[[int, str], bool], options: Any, out: Path, note: Any = dict) -> None:
    """Lower some programs; of each a line in `out`: bytes, equations, seconds, or the error."""
    import jax

    import gshard
    from gshard.rules.base.rule import REMEMBERED

    jax.config.update("jax_num_cpu_devices", 8)
    note()
    for number, (name, fn, arguments, devices) in enumerate(cases(options.random, options.more)):
        if not chosen(number, name):
            continue
        jax.clear_caches()
        for found in (REMEMBERED.factors, REMEMBERED.cheapest, REMEMBERED.in_place):
            found.clear()  # what was found before is not executed again
        note()
        start, row = time.process_time(), {"program": name}
        try:
            how = devices if isinstance(devices, dict) else {"devices": devices}
            lowered = gshard.jit(fn, **how).lower(*arguments)
            row["bytes"] = sum(c.total_bytes for c in lowered.collectives)
            row["equations"] = lowered.num_equations
        except Exception as error:  # one program must not hide the others
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        row |= {"seconds": round(time.process_time() - start, 2)} | note()
        with out.open("a") as file:
            print(json.dumps(row), file=file)


def baseline(options: Any, folder: Path) -> tuple[Rows, Blocks]:
    """All programs as they are lowered today, and what of the partitioner each executes."""
    store, blocks = folder / "baseline.jsonl", Blocks(ROOT, partitioner(ROOT))

    def part(k: int) -> Callable[[Path], None]:
        def work(out: Path) -> None:
            load(ROOT, blocks.codes, blocks.hit)
            lower(lambda number, name: number % options.jobs == k, options, out, blocks.note)

        return work

    if not store.exists():
        work = [(k, part(k)) for k in range(options.jobs)]
        lines = [
            r for _, rows, *_ in Children(options.jobs, _LONGEST).map(work, folder) for r in rows
        ]
        store.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return by_program(map(json.loads, lines_of(store))), blocks


def by_program(lines: Iterable[dict[str, Any]]) -> Rows:
    """Rows by the names of their programs."""
    return {line["program"]: line for line in lines if "program" in line}


def reached(mechanism: Mechanism, blocks: Blocks, before: Rows) -> set[str]:
    """The programs that execute the smallest blocks around the places where it is left out."""
    wanted = 0
    for file, line in mechanism.places(ROOT):
        mine = [(b - a, n, a, b) for n, (own, a, b) in enumerate(blocks.spans) if own == file]
        around = [(size, n) for size, n, a, b in mine if a <= line <= b]
        for n in [min(around)[1]] if around else [n for _, n, _, _ in mine]:
            wanted |= 1 << n
    return {name for name, row in before.items() if int(row["blocks"], 16) & wanted}


# ---------------------------------------------------------------- the comparison


def compared(before: Rows, after: Rows) -> dict[str, Any]:
    """Of programs with and without a mechanism: which send more or fail, and by how much."""
    both = {n: (before[n], row) for n, row in after.items() if "failed" not in before.get(n, row)}
    failed = [name for name, (_, new) in both.items() if "failed" in new]
    both = {name: rows for name, rows in both.items() if name not in failed}
    ratios = {n: new["bytes"] / max(old["bytes"], 1) for n, (old, new) in both.items()}
    changed = {n: r for n, r in ratios.items() if both[n][0]["bytes"] != both[n][1]["bytes"]}
    sums = {
        k: [sum(r[i][k] for r in both.values()) for i in (0, 1)] for k in ("equations", "seconds")
    }
    return {
        "more": {n: r for n, r in changed.items() if r > 1},
        "less": {n: r for n, r in changed.items() if r < 1},
        "failed": failed,
        **{k: new / old if old else 1.0 for k, (old, new) in sums.items()},
    }


def told(mechanism: Mechanism, before: Rows, after: Rows) -> str:
    """What changes without a mechanism, program by program."""
    found = compared(before, after)
    rows = [
        f"  {name}: {before[name]['bytes']:,} -> {after[name]['bytes']:,} bytes ({ratio:.2f})"
        for name, ratio in [*found["more"].items(), *found["less"].items()]
    ]
    rows += [f"  {name}: {after[name]['failed']}" for name in found["failed"]]
    times = f"equations {found['equations']:.3f}, seconds {found['seconds']:.2f}"
    return "\n".join([f"{mechanism.name}: of {len(after)} programs {len(rows)}; {times}", *rows])


def markdown(chosen: Sequence[Mechanism], before: Rows, results: Mapping[str, Rows]) -> str:
    """The table of docs/design/ablation.md, the most lines first."""
    lines = [
        "| mechanism | lines | reached | send more | send less | fail | most, in |",
        "|---|" + "---:|" * 5 + "---|",
    ]
    for mechanism in sorted(chosen, key=lambda m: -m.lines(ROOT)):
        after = results[mechanism.name]
        found = compared(before, after)
        worst = max(found["more"], key=lambda n: found["more"][n], default="")
        most = f"{found['more'][worst]:,.2f}, {worst}" if worst else ""
        counts = (len(after), *(len(found[k]) for k in ("more", "less", "failed")))
        cells = (mechanism.what, f"{mechanism.lines(ROOT):,}", *counts, most)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Lower, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mechanisms with one of these texts, a,b")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--random", type=int, default=150, help="how many random programs")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="files with `cases()`")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "ablation")
    options = parser.parse_args()
    known = [m for m in mechanisms() if any(t in m.name for t in options.only.split(","))]
    sources = "".join((ROOT / file).read_text() for file in partitioner(ROOT))
    sources += f"{options.random} {options.more}"
    folder = options.folder / hashlib.sha256(sources.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    warm_up(ROOT)
    before, blocks = baseline(options, folder)
    keys = {m.name: hashlib.sha256(repr(m).encode()).hexdigest()[:16] for m in known}
    store = folder / "results.jsonl"
    done = {line["key"]: by_program(line["rows"]) for line in map(json.loads, lines_of(store))}

    def without(mechanism: Mechanism) -> Callable[[Path], None]:
        def work(out: Path) -> None:
            names = reached(mechanism, blocks, before)
            load(ROOT, mechanism.codes(ROOT))
            lower(lambda number, name: name in names, options, out)

        return work

    todo = [(m, without(m)) for m in known if keys[m.name] not in done]
    for mechanism, rows, how, _ in Children(options.jobs, _LONGEST).map(todo, folder):
        if how != "ended":
            print(f"{mechanism.name}: {how}", file=sys.stderr, flush=True)
            continue
        done[keys[mechanism.name]] = by_program(rows)
        with store.open("a") as file:
            print(json.dumps({"key": keys[mechanism.name], "rows": rows}), file=file)
        print(told(mechanism, before, done[keys[mechanism.name]]), flush=True)
    results = {m.name: done[keys[m.name]] for m in known if keys[m.name] in done}
    print(markdown([m for m in known if m.name in results], before, results))


if __name__ == "__main__":
    main()
