"""What a fused operator reads and writes."""

import jax
import jax.numpy as jnp
import pytest

from gshard.autosharding.cost.strategies import FusedWork
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import hardware


@pytest.mark.parametrize(
    ("axes", "reads"),
    [
        ((0,), True),  # rows are summed up: nothing can be fused with what reads the sums
        ((0, 1, 2), True),  # so many rows that no device has a single one
        ((1, 2), False),  # a device may have one row of dim 1, and keep it on chip
    ],
)
def test_only_reductions_of_rows_may_read_nothing(axes, reads):
    def fn(x):
        return jnp.exp(x - jnp.sum(x * x, axes, keepdims=True))

    subject = TracedProgram.of(fn, (jax.ShapeDtypeStruct((64, 8, 128), jnp.float32),), 8)
    work = FusedWork(subject, hardware("h100"), fused_on=8)
    eqn = next(e for e in subject.flat.jaxpr.eqns if e.primitive.name == "mul")
    assert bool(work.of(eqn).reads) == reads
