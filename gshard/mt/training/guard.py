"""The loss guard: an update that would do harm is left out, and counted.

The decision is made on the device, as part of the step, from numbers that are checkpointed with
the weights: a run that is resumed decides the same, and no step waits for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_MEMORY = 0.98  # of the running mean: about the last 50 losses
_SETTLED = 50  # losses before anything finite can be called a spike
_LEAST = 0.02  # of the mean: a deviation never counts as less, however smooth the curve


class Guard(NamedTuple):
    """What is remembered of the losses so far."""

    mean: Array
    deviation: Array
    seen: Array
    skipped: Array  # updates left out, in all
    in_a_row: Array

    @staticmethod
    def new() -> Guard:
        """Nothing seen yet."""
        zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return Guard(zero, zero, none, none, none)

    def judge(self, loss: Array, grad_norm: Array, spike: float) -> tuple[Guard, Array]:
        """Whether to learn from a step with this loss and gradient, and what to remember."""
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        width = jnp.maximum(self.deviation, _LEAST * jnp.abs(self.mean))
        usual = (self.seen < _SETTLED) | (loss <= self.mean + spike * width)
        good = finite & usual
        # Early on the mean is over what was seen, later it forgets.
        memory = jnp.minimum(_MEMORY, self.seen / (self.seen + 1.0))
        loss = jnp.where(good, loss, self.mean)
        mean = memory * self.mean + (1 - memory) * loss
        deviation = memory * self.deviation + (1 - memory) * jnp.abs(loss - mean)
        bad = (~good).astype(jnp.int32)
        judged = Guard(
            jnp.where(good, mean, self.mean),
            jnp.where(good, deviation, self.deviation),
            self.seen + 1 - bad,
            self.skipped + bad,
            (self.in_a_row + 1) * bad,
        )
        return judged, good


def choose(good: Array, new: Any, old: Any) -> Any:
    """The tree `new` if the step was good, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def advice(in_a_row: int, loss: float, learning_rate: float) -> str:
    """What to say when training gives up."""
    return (
        f"the last {in_a_row} updates were left out, for losses that were not finite or far above "
        f"the mean (now {loss:.3g}). The checkpoint before them is good. What helps most often: a "
        f"lower optimizer.learning_rate (it is {learning_rate:g}) or a longer optimizer.rise; "
        "float32 instead of bfloat16 (model.dtype); or looking at the data of these steps. "
        "If the higher loss is intended, raise train.spike"
    )
