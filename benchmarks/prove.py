"""What a proof finds, what it calls wrong that is right, and what it costs.

    python -m benchmarks.prove faults       # faults that are smaller than rounding
    python -m benchmarks.prove recipes      # the recipes' steps on 8 devices (or some, by name)
    python -m benchmarks.prove random 100   # random programs with their gradients
    python -m benchmarks.prove paper        # the paper's MoE Transformer on 2048 devices

Seconds are of the processor, so that other programs do not count.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from benchmarks.recipes import recipes
from examples.recipes.transformer import Size
from gshard.models.family import Deployment
from gshard.moving import collectives
from gshard.moving.nodes import code_of
from gshard.nn import FAMILY

D = 8
TINY = Size(L=2, B=64, S=8, M=32, F=64, V=72)


def row(name: str, run: Callable[[], gshard.Report]) -> bool:
    """Print one proof as a row of a table."""
    start = time.process_time()
    report = run()
    seconds = time.process_time() - start
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    covered = report.covered
    print(
        f"| {name} | {'equal' if report.ok else 'DIFFERENT'} | {report.compared:,} | "
        f"{100 * covered.share:.1f}% | {report.error_probability:.0e} | {seconds:.1f} | "
        f"{gigabytes:.2f} |",
        flush=True,
    )
    if not report.ok:
        print(f"  {report.first}")
    if covered.within_rounding:
        print(f"  within rounding: {covered.within_rounding}")
    return report.ok


def head() -> None:
    print("| program | is | values | proved | error below | s | GB, at most so far |")
    print("|---|---|---:|---:|---:|---:|---:|")


# ------------------------------------------------------------------------ right programs


def of_recipes(names: Sequence[str]) -> bool:
    head()
    chosen = [r for r in recipes(TINY) if not names or any(n in r.name for n in names)]
    found = [row(r.name, lambda r=r: gshard.prove(r.step, *r.arguments, devices=D)) for r in chosen]
    return all(found)


def of_random_programs(count: int) -> bool:
    """The random programs of the tests, values and gradients, in float32 and bfloat16."""
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st

    from tests.oracle import random_array
    from tests.programs.test_random_programs import program, random_programs

    head()
    found: list[bool] = []

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(random_programs(), st.sampled_from([jnp.float32, jnp.bfloat16]))
    def run(case: Any, dtype: Any) -> None:
        devices, shapes, inputs, steps = case
        fn = program(steps, inputs, lambda x, a: x if a is None else gshard.shard(x, a))
        args = [random_array(s, dtype, seed=i) for i, s in enumerate(shapes)]

        def both(*xs: Any) -> Any:
            return fn(*xs), jax.grad(lambda *a: fn(*a)[1], argnums=(0, 1))(*xs)

        name = " ".join(step[0] for step in steps)
        found.append(row(name, lambda: gshard.check(both, *args, devices=devices)))

    run()
    print(f"{len(found) - sum(found)} of {len(found)} are called wrong")
    return all(found)


def of_paper(devices: int = 2048, layers: int = 12) -> bool:
    """The step with Adafactor, dropout and top-2 gating, as many experts as devices."""
    model = FAMILY["moe_2048e_12l"].replace(
        experts=devices, groups=devices, encoder_layers=layers // 2, decoder_layers=layers // 2,
        source_vocab=12, target_vocab=8, model_dim=2, hidden_dim=3, heads=2, key_dim=2, value_dim=2,
    )  # fmt: skip
    model = replace(model, devices=devices, batch_tokens=2 * devices, length=2)
    head()

    def prove() -> gshard.Report:
        lowered = Deployment(model, 2 * model.batch_tokens).lowered("tpu-v3")
        lowered.resized = None  # the sizes are small already
        return lowered.prove()

    return row(f"{layers} layers, {devices:,} devices", prove)


# ------------------------------------------------------------------------ faults


def _without_a_small_element(right: Any, place: Any, x: Any, *more: Any) -> Any:
    """A row of a million times smaller size is left out of the sum."""
    part = jnp.where(place.device_id() == 4, jnp.asarray(_ROWS[9]), 0)
    return right(place, x - part, *more)


def _in_bfloat16(right: Any, place: Any, x: Any, *more: Any) -> Any:
    """Each part is rounded before the sum, and not the sum after it."""
    return right(place, x.astype(jnp.bfloat16), *more).astype(x.dtype)


def _scaled(right: Any, place: Any, x: Any, *more: Any) -> Any:
    """A factor of 1 + 2**-23, the rounding of float32."""
    return right(place, x, *more) * np.float32(1 + 2.0**-23)


_ROWS = np.random.default_rng(0).random((16, 4)).astype(np.float32) + 1
_ROWS[9] *= 1e-7


def of_faults() -> bool:
    """Faults of every sum over devices, and swapped tiles, one at a time."""
    zeros = np.zeros((16, 4), np.float32)
    sums: Callable[[Any], Any] = lambda x: gshard.split(x, 0, D).sum(0)  # noqa: E731
    moved: Callable[[Any], Any] = lambda x: gshard.replicate(gshard.split(x, 0, D) * 2.0)  # noqa: E731
    swapped = lambda *_, **__: (tuple(range(D))[::-1],)  # noqa: E731
    right = collectives.all_reduce
    rows = [
        (
            "a row of a millionth of the size left out of a sum",
            sums,
            _ROWS,
            _without_a_small_element,
        ),
        ("a sum of float32 made in bfloat16", sums, _ROWS, _in_bfloat16),
        ("a factor of 1 + 2**-23", sums, _ROWS, _scaled),
        ("tiles that are all zeros swapped", moved, zeros, None),
    ]
    print("| fault | found | floats differ, relatively, by | what it says |\n|---|---|---:|---|")
    found = []
    for name, fn, x, change in rows:
        code_of.cache_clear()
        jax.clear_caches()
        kept = collectives._covering
        if change is None:
            collectives._covering = swapped
        else:
            collectives.all_reduce = lambda *a, c=change: c(right, *a)
        report = gshard.check(lambda x, fn=fn: fn(x), x, devices=D)
        collectives.all_reduce, collectives._covering = right, kept
        found.append(not report.ok)
        first = report.first
        apart = (
            0.0
            if first is None
            else abs(first.got - first.expected) / max(abs(first.expected), 1e-30)
        )
        text = "" if first is None else f"{first.operator}{first.why and ', ' + first.why}"
        print(f"| {name} | {'yes' if found[-1] else 'NO'} | {apart:.0e} | {text} |", flush=True)
    code_of.cache_clear()
    return all(found)


def main() -> None:
    what, *more = sys.argv[1:] or ["faults"]
    runs: dict[str, Callable[[], bool]] = {
        "faults": of_faults,
        "recipes": lambda: of_recipes(more),
        "random": lambda: of_random_programs(int(more[0]) if more else 100),
        "paper": lambda: of_paper(*map(int, more)),
    }
    if what not in runs:
        sys.exit(f"gshard: {what!r} is none of {', '.join(runs)}")
    sys.exit(0 if runs[what]() else 1)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", D)
    main()
