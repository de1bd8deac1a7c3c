"""One MoE layer, forward and backward, by one-hot einsums and by index, on this machine.

    python -m benchmarks.dispatch                       a small layer, for a CPU
    python -m benchmarks.dispatch --large               the paper's dims, for one GPU

Times are medians of runs that alternate between the two.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from gshard.nn import MoE
from gshard.nn.experts import DISPATCHES

RUNS = 10
SMALL = {"G": 8, "S": 256, "M": 128, "H": 512, "E": 16, "dtype": "float32"}
LARGE = {"G": 32, "S": 2048, "M": 1024, "H": 8192, "E": 128, "dtype": "bfloat16"}


def step(dispatch: str, G: int, S: int, M: int, H: int, E: int, dtype: str):
    """The gradient of a layer's output with respect to its weights and inputs, compiled."""
    keys = jax.random.split(jax.random.key(0), 3)
    layer = MoE(E, M, H, dtype, keys[0], dispatch=dispatch)  # type: ignore[arg-type]
    x_GSM = jax.random.normal(keys[1], (G, S, M), dtype)

    def loss(layer, x_GSM):
        y_GSM, _ = layer(x_GSM, jnp.ones((G, S), bool), keys[2])
        return jnp.sum(y_GSM.astype(jnp.float32) ** 2)

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: jax.block_until_ready(run(layer, x_GSM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="the paper's dims")
    sizes = LARGE if parser.parse_args().large else SMALL
    steps = {name: step(name, **sizes) for name in DISPATCHES}  # type: ignore[arg-type]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run()  # compiles
    for _ in range(RUNS):
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    dims = ", ".join(f"{k}={v}" for k, v in sizes.items())
    table = Table(title=f"forward and backward, {dims}, {jax.devices()[0].device_kind}")
    for column in ("dispatch", "ms"):
        table.add_column(column, justify="right")
    for name, found in times.items():
        table.add_row(name, f"{1000 * statistics.median(found):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
