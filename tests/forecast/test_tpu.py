"""What XLA for TPUs fuses with a matrix product."""

import jax
import jax.numpy as jnp

import gshard
from gshard.forecast.program import body_of
from gshard.forecast.work import moved_bytes


def test_a_product_that_is_fused_with_a_slice_reads_its_operands():
    """Only what is sliced is read in part, not what the slice is multiplied by."""

    def fn(x, w):
        return x @ w[:64]

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (128, 4))]
    jaxpr = gshard.jit(fn, devices=1).lower(*args).jaxpr
    (operator,) = [o for o, _, _ in body_of(jaxpr, "tpu").walk()]
    assert {op.name for op in operator.members} == {"slice", "dot_general"}
    assert moved_bytes(operator) >= 4 * (512 * 64 + 64 * 4 + 512 * 4)
