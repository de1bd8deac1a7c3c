"""The passes of a layer: what each computes, and what is kept between them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from gshard.pipelining.passes import differentiated


def layer(gain, up, down, x):
    return x + jax.nn.gelu((x * gain) @ up) @ down


def test_what_is_kept_for_weights_are_the_operands_of_their_products():
    """Elementwise work and sums come before: two operands for each product, and a gain's sum."""
    rng = np.random.default_rng(0)
    shapes = ((8,), (8, 32), (32, 8), (4, 8))
    operands = [jnp.float32(rng.normal(size=shape)) for shape in shapes]
    passes = differentiated(jax.make_jaxpr(layer)(*operands), fixed=3)
    kinds = {eqn.primitive.name for eqn in passes.weights.jaxpr.eqns}
    assert kinds <= {"dot_general", "transpose"}, kinds
    kept = [aval.shape for aval in passes.backward.out_avals[1:]]
    assert sorted(kept) == sorted([(8,), (4, 8), (4, 32), (4, 32), (4, 8)])
    cotangent = jnp.ones((4, 8))
    y, *residuals = jaxpr_as_fun(passes.forward)(*operands)
    dx, *needed = jaxpr_as_fun(passes.backward)(*operands[:3], *residuals, cotangent)
    found = [*jaxpr_as_fun(passes.weights)(*operands[:3], *needed), dx]
    wanted, pullback = jax.vjp(layer, *operands)
    np.testing.assert_allclose(y, wanted, rtol=1e-5)
    for one, other in zip(found, pullback(cotangent), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
