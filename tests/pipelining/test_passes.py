"""The passes of a layer: what each computes, and what is kept between them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from gshard.pipelining.passes import differentiated, inlined, lifted


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


def test_what_needs_no_operand_is_lifted_but_for_broadcasts():
    """A mask of a layer is computed once, and broadcast where it is read or (`masks`) before."""

    def attend(q, k):
        mask = jnp.tril(jnp.ones((5, 5), bool)) & (jnp.arange(5) < 9)
        scores = jnp.where(mask, jnp.einsum("bsh,bth->bst", q, k), -1e9)
        jax.debug.callback(lambda _: None, q)
        total, _ = jax.lax.scan(lambda c, x: (c + x, x * c), scores[0], scores)
        return scores + total + jnp.sin(jnp.arange(5.0)), jnp.arange(3) * 2

    q, k = (jnp.float32(np.random.default_rng(n).normal(size=(4, 5, 8))) for n in (0, 1))
    whole = inlined(jax.make_jaxpr(attend)(q, k))
    for masks, kind in ((False, "bool[5,5]"), (True, "bool[4,5,5]")):
        first, rest = lifted(whole, masks)
        kept = {aval.str_short(short_dtypes=True) for aval in first.out_avals}
        assert {kind, "i32[3]"} <= kept <= {kind, "i32[3]", "f32[5]", "f32[1,1,5]", "f32[4,5,5]"}
        assert not {"ge", "sin"} & {eqn.primitive.name for eqn in rest.jaxpr.eqns}
        assert not first.effects
        assert rest.effects
        found = jaxpr_as_fun(rest)(*jaxpr_as_fun(first)(), q, k)
        for one, other in zip(found, attend(q, k), strict=True):
            np.testing.assert_array_equal(one, other)
