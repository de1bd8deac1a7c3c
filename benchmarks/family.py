"""Every model of the paper, its training step lowered for the paper's devices, on this machine.

    python -m benchmarks.family

No device is needed, and no weight is allocated. The paper's B is 2^30 where its table is met
(see gshard/nn/family.py).
"""

from __future__ import annotations

import math
import resource
import time

import jax
from rich.console import Console
from rich.table import Table

import gshard
from gshard.nn import FAMILY, Model, adafactor, init_state, train_step


def lower(model: Model) -> tuple[gshard.Lowered, float]:
    """The training step with Adafactor, and the processor seconds it takes to lower."""
    optimizer = adafactor()
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_state(model.config, optimizer, key), key)

    def step(state, batch, key):
        return train_step(state, batch, key, optimizer=optimizer, strategy=model.strategy)

    start = time.process_time()
    lowered = gshard.jit(step, devices=model.devices).lower(state, model.batch, key)
    assert lowered.jaxpr  # emitted, too
    return lowered, time.process_time() - start


def state_bytes(lowered: gshard.Lowered) -> int:
    """Weights and optimizer state (and the batch) on one device."""
    shardings = jax.tree.leaves(lowered.in_shardings)
    avals = jax.tree.leaves(lowered.args_info)
    return sum(math.prod(s.local_shape(a.shape)) * 4 for s, a in zip(shardings, avals, strict=True))


def main() -> None:
    table = Table(title="training steps of the paper's models, lowered without hardware")
    for column in (
        "model",
        "weights / 2^30",
        "paper",
        "devices",
        "AllToAll per MoE layer",
        "AllToAll, GB sent",
        "AllReduce, GB sent",
        "state per device, GB",
        "equations",
        "processor seconds",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, model in FAMILY.items():
        if model.paper_weights is None:
            continue
        lowered, seconds = lower(model)
        layers = (model.config.encoder_layers + model.config.decoder_layers) // 2
        sent = {"all_to_all": 0, "all_reduce": 0}
        exchanges = 0
        for c in lowered.collectives:
            sent[c.kind] += c.total_bytes
            exchanges += c.count * (c.kind == "all_to_all")
        table.add_row(
            name,
            f"{model.weights / 2**30:.1f}",
            f"{model.paper_weights:g}",
            str(model.devices),
            f"{exchanges / layers:g}",
            f"{sent['all_to_all'] / 1e9:.2f}",
            f"{sent['all_reduce'] / 1e9:.2f}",
            f"{state_bytes(lowered) / 1e9:.2f}",
            str(lowered.num_equations),
            f"{seconds:.1f}",
        )
    console = Console(width=170)
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(f"at most {peak:.1f} GB of memory")


if __name__ == "__main__":
    main()
