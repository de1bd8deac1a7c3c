"""The arithmetic of products, beside XLA's own count of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gshard.forecast.work import flops_of
from gshard.graph.kinds import PRODUCTS


def zeros(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolved(groups):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (2, 1), "VALID", feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


@pytest.mark.parametrize(("fn", "operands", "wanted"), [
    (jnp.dot, (zeros(6, 5), zeros(5, 7)), 2 * 6 * 7 * 5),
    (lambda x, w: jnp.einsum("gbmk,gkn->gbmn", x, w), (zeros(3, 2, 4, 5), zeros(3, 5, 7)),
     2 * 3 * 8 * 7 * 5),
    (lambda x, w: jnp.einsum("klm,lkn->mn", x, w), (zeros(2, 3, 4), zeros(3, 2, 5)),
     2 * 4 * 5 * 6),
    (convolved(1), (zeros(2, 9, 8, 4), zeros(3, 2, 4, 6)), 2 * (2 * 4 * 7) * 6 * 24),
    (convolved(2), (zeros(2, 9, 8, 4), zeros(3, 2, 2, 6)), 2 * (2 * 4 * 7) * 6 * 12),
])  # fmt: skip
def test_a_product_has_the_operations_that_xla_counts(fn, operands, wanted):
    (eqn,) = [e for e in jax.make_jaxpr(fn)(*operands).eqns if e.primitive in PRODUCTS]
    assert flops_of(eqn) == wanted
    assert flops_of(eqn) == jax.jit(fn).lower(*operands).compile().cost_analysis()["flops"]
