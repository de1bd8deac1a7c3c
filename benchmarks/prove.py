"""What a proof finds, what it calls wrong that is right, and what it costs.

    python -m benchmarks.prove faults            # faults that are smaller than rounding
    python -m benchmarks.prove recipes           # the recipes' steps on 8 devices (or some)
    python -m benchmarks.prove random            # 300 random programs with their gradients (or N),
                                                 # and those of another seed (N SEED)
    python -m benchmarks.prove harness           # JAX's own cases of its operators, sharded
    python -m benchmarks.prove scripts A.py ...  # every call of gshard.jit that scripts make
    python -m benchmarks.prove paper             # the paper's MoE Transformer on 2048 devices
    python -m benchmarks.prove costs             # and those of the check by bounds of rounding

`--jobs 16` takes so many processes. Each result is a line of the file `--out`, from which a run
that was interrupted resumes. Seconds are processor time, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import gshard
from benchmarks.prove_faults import of_faults
from benchmarks.recipes import recipes
from examples.recipes.transformer import Size
from gshard.models.family import Deployment
from gshard.nn import FAMILY

ROOT = Path(__file__).parents[1]
D = 8
TINY = Size(L=2, B=64, S=8, M=32, F=64, V=72)
MOST_TIME, MOST_MEMORY = 1.5, 0.5  # of that check: what an exact one may cost
BOUNDS = "3bc4e56"  # the last commit whose check compared floats within bounds of rounding
Proof = tuple[str, Callable[[], gshard.Report]]


def result(name: str, run: Callable[[], gshard.Report]) -> dict[str, Any]:
    """What one proof says, and what it cost."""
    start = time.process_time()
    try:
        report = run()
    except Exception as error:  # a program that the check cannot run counts, too
        return {"name": name, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {
        "name": name,
        "first": "" if report.ok else str(report.first),
        "values": report.compared,
        "proved": report.covered.proved,
        "within": dict(report.covered.within_rounding),
        "chance": report.error_probability,
        "seconds": time.process_time() - start,
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def shown(each: dict[str, Any]) -> str:
    if "error" in each:
        return f"| {each['name']} | NOT CHECKED: {each['error']} | | | | | |"
    share = 100 * each["proved"] / max(each["values"], 1)
    row = (
        f"| {each['name']} | {'DIFFERENT' if each['first'] else 'equal'} | {each['values']:,} | "
        f"{share:.1f}% | {each['chance']:.0e} | {each['seconds']:.1f} | {each['gigabytes']:.2f} |"
    )
    return row + (f"\n  {each['first']}" if each["first"] else "")


def summary(found: list[dict[str, Any]]) -> str:
    """Programs, false alarms, the share that is exact, and the operators of the rest."""
    done = [each for each in found if "error" not in each]
    wrong = [each for each in done if each["first"]]
    values, proved = (sum(each[k] for each in done) for k in ("values", "proved"))
    within: Counter[str] = Counter()
    for each in done:
        within.update(each["within"])
    lines = [
        f"{len(found):,} programs: {len(wrong)} called wrong, {len(found) - len(done)} not run, "
        f"{sum(not each['within'] for each in done):,} proved; {values:,} values, "
        f"{100 * proved / max(values, 1):.2f}% of them exactly",
        "within rounding: " + (", ".join(f"{k} {n:,}" for k, n in within.most_common()) or "none"),
    ]
    return "\n".join([*lines, *(f"  {each['name']}: {each['first']}" for each in wrong)])


# ------------------------------------------------------------------------ right programs


def of_recipes(names: list[str]) -> Iterator[Proof]:
    for r in recipes(TINY):
        if not names or any(n in r.name for n in names):
            yield r.name, lambda r=r: gshard.prove(r.step, *r.arguments, devices=D)


def of_random_programs(names: list[str]) -> Iterator[Proof]:
    """The random programs of the tests, values and gradients, in float32 and bfloat16."""
    from hypothesis import Phase, given, seed, settings
    from hypothesis import strategies as st

    from tests.oracle import random_array
    from tests.programs.test_random_programs import program, random_programs

    found: list[tuple[Any, Any]] = []
    count, start = (int(n) for n in (*names, *("300", "0")[len(names) :]))

    @seed(start)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(random_programs(), st.sampled_from([jnp.float32, jnp.bfloat16]))
    def draw(case: Any, dtype: Any) -> None:
        found.append((case, dtype))

    draw()

    def run(case: Any, dtype: Any) -> gshard.Report:
        devices, shapes, inputs, steps = case
        fn = program(steps, inputs, lambda x, a: x if a is None else gshard.shard(x, a))
        args = [random_array(s, dtype, seed=i) for i, s in enumerate(shapes)]

        def both(*xs: Any) -> Any:
            return fn(*xs), jax.grad(lambda *a: fn(*a)[1], argnums=(0, 1))(*xs)

        return gshard.check(both, *args, devices=devices)

    for case, dtype in found:
        yield " ".join(step[0] for step in case[3]), lambda c=case, t=dtype: run(c, t)


def of_harness(names: list[str]) -> Iterator[Proof]:
    """JAX's own cases for its operators, sharded at random: some of each operator."""
    from tests.rules import harness

    for name in sorted(harness.spread(int(names[0]) if names else 14)):

        def run(name: str = name) -> gshard.Report:
            jitted, args = harness.partitioned(name)
            return jitted.lower(*args).check(*args)

        yield name, run


def of_scripts(names: list[str], kept: Kept) -> None:
    """Every call of a function of `gshard.jit` in scripts is checked before it is made.

    A part is that of the functions in a script's `CASES`, or else of the calls.
    """
    right, calls, running, part = gshard.jit, [0], [""], kept.part

    def jit(fun: Any = None, /, **keywords: Any) -> Any:
        if fun is None:
            return lambda fun: jit(fun, **keywords)
        jitted, known = right(fun, **keywords), set()

        def call(*args: Any, **kwargs: Any) -> Any:
            types = str(jax.tree.map(jnp.shape, (args, kwargs)))
            if types not in known:
                known.add(types)
                calls[0] += 1
                if running[0] or calls[0] % part[1] == part[0]:
                    name = f"{Path(sys.argv[0]).stem} {running[0] or calls[0]}"
                    kept.add(name, lambda: jitted.lower(*args, **kwargs).check(*args, **kwargs))
            return jitted(*args, **kwargs)

        for attribute in ("lower", "options"):
            if hasattr(jitted, attribute):
                setattr(call, attribute, getattr(jitted, attribute))
        return call

    gshard.jit = jit
    for name in names:
        sys.argv = [name]
        sys.path.insert(0, str(Path(name).parent))
        try:
            cases = list(runpy.run_path(name, run_name="script").get("CASES", {}).values())
        except SystemExit:  # the script has run to its end
            cases = []
        for case in cases[part[0] :: part[1]]:
            running[0] = case.__name__
            if kept.is_done(f"{Path(name).stem} {case.__name__}"):
                continue
            try:
                case()
            except Exception as error:
                print(f"{case.__name__}: {type(error).__name__} {error}", file=sys.stderr)
            jax.clear_caches()


def of_paper(names: list[str]) -> Iterator[Proof]:
    """The step with Adafactor, dropout and top-2 gating, as many experts as devices."""
    devices, layers = (int(n) for n in (*names, *("2048", "12")[len(names) :]))
    model = FAMILY["moe_2048e_12l"].replace(
        experts=devices, groups=devices, encoder_layers=layers // 2, decoder_layers=layers // 2,
        source_vocab=12, target_vocab=8, model_dim=2, hidden_dim=3, heads=2, key_dim=2, value_dim=2,
    )  # fmt: skip
    model = replace(model, devices=devices, batch_tokens=2 * devices, length=2)

    def prove() -> gshard.Report:
        lowered = Deployment(model, 2 * model.batch_tokens).lowered("tpu-v3")
        lowered.resized = None  # the sizes are small already
        return lowered.prove()

    yield f"{layers} layers, {devices:,} devices", prove


# ------------------------------------------------------------------------ costs

_ONE = """
import resource, sys, time, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import gshard
from benchmarks.recipes import recipes
from examples.recipes.transformer import Size
(r,) = [r for r in recipes(Size(L=2, B=64, S=8, M=32, F=64, V=72)) if r.name == sys.argv[1]]
rng = np.random.default_rng(0)
is_int = lambda x: np.issubdtype(x.dtype, np.integer)
draw = lambda x: rng.integers(0, 8, x.shape) if is_int(x) else rng.normal(size=x.shape)
args = jax.tree.map(lambda x: draw(x).astype(x.dtype), r.arguments)
lowered = gshard.jit(r.step, devices=8).lower(*args)
start = time.process_time()
ok = lowered.check(*args).ok
print("found", ok, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def of_costs(names: list[str]) -> bool:
    """Recipes by the check of `BOUNDS` and by this one, each in a process of its own."""
    old = ROOT / "build" / BOUNDS
    if not old.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(old), BOUNDS], check=True)
    print("| step on 8 devices | by bounds of rounding | exact | of the time | of the memory |")
    print("|---|---|---|---:|---:|")
    within = True
    for name in names or ["data parallel, Adam", "tensor parallel"]:
        costs = []
        for root in (old, ROOT):
            command = ["env", f"PYTHONPATH={root}", sys.executable, "-c", _ONE, name]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True)
            words = done.stdout.split()[-4:]
            if len(words) < 4 or words[0] != "found":
                sys.exit(f"{name} in {root} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            costs.append((float(words[2]), int(words[3]) / 2**20))
        shares = [new / old for old, new in zip(*costs, strict=True)]
        within &= shares[0] <= MOST_TIME and shares[1] <= MOST_MEMORY
        cells = [f"{seconds:.1f} s, {size:.2f} GB" for seconds, size in costs]
        print(f"| {' | '.join([name, *cells, *(f'{x:.2f}' for x in shares)])} |", flush=True)
    print(f"at most {MOST_TIME} of the time, {MOST_MEMORY} of the memory: {within}")
    return within


FAMILIES: dict[str, Callable[[list[str]], Iterator[Proof]]] = {
    "recipes": of_recipes,
    "random": of_random_programs,
    "harness": of_harness,
    "paper": of_paper,
}
OTHERS: dict[str, Callable[[list[str]], bool]] = {
    "faults": lambda names: of_faults(),
    "costs": of_costs,
}


class Kept:
    """The results of a part of the programs, each in a file as soon as it is there."""

    def __init__(self, out: Path, part: tuple[int, int], seconds: float):
        self.out, self.part = out, part
        self._until = time.monotonic() + seconds
        self._done = {each["name"] for each in kept_in(out)}

    def add(self, name: str, run: Callable[[], gshard.Report]) -> None:
        """Run a proof, if there is no result and time is left."""
        if self.is_done(name):
            return
        found = result(name, run)
        with self.out.open("a") as file:
            print(json.dumps(found), file=file)
        print(shown(found), flush=True)

    def is_done(self, name: str) -> bool:
        """Whether there is nothing more to do for a program."""
        return name in self._done or time.monotonic() > self._until


def kept_in(out: Path) -> list[dict[str, Any]]:
    """The results in a file."""
    lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def part_of(what: str, names: list[str], kept: Kept) -> None:
    """Every so many-th program."""
    if what == "scripts":
        return of_scripts(names, kept)
    for number, (name, run) in enumerate(FAMILIES[what](names)):
        if number % kept.part[1] == kept.part[0]:
            kept.add(f"{number}: {name}", run)
            if number // kept.part[1] % 20 == 19:
                jax.clear_caches()
    return None


def in_parts(words: list[str], jobs: int) -> int:
    """Run all programs by so many processes, whose glibc keeps freed memory; how many failed."""
    command = [sys.executable, "-m", "benchmarks.prove", *words]
    os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**40))
    running = [subprocess.Popen([*command, "--part", f"{n}/{jobs}"]) for n in range(jobs)]
    return sum(process.wait() != 0 for process in running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*FAMILIES, "scripts", *OTHERS])
    parser.add_argument("names", nargs="*", help="which ones, or how many")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which none is begun")
    parser.add_argument("--out", type=Path, help="a file of results, a line of JSON each")
    parser.add_argument("--part", default="", help="i/n: every n-th program, in this process")
    options = parser.parse_args()
    if options.what in OTHERS:
        sys.exit(0 if OTHERS[options.what](options.names) else 1)
    out = options.out or ROOT / "build" / "prove" / f"{options.what}-{os.getpid()}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    if options.part:
        number, count = map(int, options.part.split("/"))
        return part_of(options.what, options.names, Kept(out, (number, count), options.seconds))
    print("| program | is | values | proved | error below | s | GB, at most so far |")
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    limits = ["--seconds", str(options.seconds), "--out", str(out)]
    failed = in_parts([options.what, *options.names, *limits], options.jobs)
    found = kept_in(out)
    print(summary(found), f"{failed} processes failed", sep="\n")
    sys.exit(1 if failed or any(each.get("first") for each in found) else 0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", D)
    main()
