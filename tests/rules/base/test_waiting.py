"""Which sums may wait, and what share of each is paid: of small programs, without devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard.rules  # noqa: F401 (registers what operators are linear in)
from gshard.graph.regions import Loop
from gshard.rules.base.unreduced import can_stay
from gshard.rules.base.uses import Delayed, Uses, accumulators
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile
from tests.oracle import even_split

X, W = np.zeros((4, 8), np.float32), np.zeros((8, 3), np.float32)


def made_by(jaxpr, name: str):
    """The results of all equations of a primitive."""
    return [v for eqn in jaxpr.eqns if eqn.primitive.name == name for v in eqn.outvars]


def traced(fn, *args):
    return jax.make_jaxpr(fn)(*args).jaxpr


def test_two_sums_that_are_added_pay_half_each():
    jaxpr = traced(lambda x, w: x @ w + (2 * x) @ w, X, W)
    found = Delayed(Uses(jaxpr))
    assert [found[v] for v in made_by(jaxpr, "dot_general")] == [0.5, 0.5]


def test_a_sum_that_is_used_twice_does_not_wait():
    def fn(x, w):
        y = x @ w
        return y + (2 * x) @ w, y

    jaxpr = traced(fn, X, W)
    twice, _ = made_by(jaxpr, "dot_general")
    assert twice not in Delayed(Uses(jaxpr))


def test_a_sum_that_waits_has_the_other_operands_gathered():
    """A mask with a part on every device has to move; one of floats is as much as the sum."""
    assert share_of_a_masked_sum(np.bool_, split=False) == 1 / 4
    assert share_of_a_masked_sum(np.bool_, split=True) == 1 / 2
    assert share_of_a_masked_sum(np.float32, split=True) is None


def share_of_a_masked_sum(masked, split):
    def fn(x, w, mask):
        y = x @ w
        kept = lax.select(mask, y, jnp.zeros_like(y)) if masked is np.bool_ else y * mask
        return kept.sum(0)

    jaxpr = traced(fn, X, W, np.zeros((4, 3), masked))
    made = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    shardings = {v: Sharding.replicated(len(v.aval.shape), 4) for v in made}
    if split:
        shardings[jaxpr.invars[2]] = Sharding.of_assignment(even_split(2, 0, 4), 4)
    (product,) = made_by(jaxpr, "dot_general")
    return Delayed(Uses(jaxpr), {}, shardings).get(product)


@pytest.mark.parametrize(("made", "kept", "waits"), [
    (jnp.float32, jnp.bfloat16, False),
    (jnp.bfloat16, jnp.float32, True),
    (jnp.float16, jnp.bfloat16, False),
])  # fmt: skip
def test_no_sum_is_accumulated_in_a_type_that_does_not_hold_it(made, kept, waits):
    x, w, total = X.astype(made), W.astype(made), jnp.zeros((4, 3), kept)
    jaxpr = traced(lambda total, x, w: total + (x @ w).astype(kept), total, x, w)
    (product,) = made_by(jaxpr, "dot_general")
    assert (product in Delayed(Uses(jaxpr), {0: 0.5})) is waits


@pytest.mark.parametrize(
    ("step", "adds"),
    [
        (lambda c, x: (c + x, None), True),
        (lambda c, x: (c - x, None), True),
        (lambda c, x: (x - c, None), False),
        (lambda c, x: (c * x, None), False),
        (lambda c, x: (c + x, c), False),
    ],
)
def test_a_carried_value_accumulates_if_it_is_only_added_to(step, adds):
    jaxpr = traced(lambda xs: lax.scan(step, jnp.zeros(3), xs), np.zeros((5, 3), np.float32))
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is lax.scan_p]
    assert (0 in accumulators(Loop.of(scan))) is adds


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int32, np.bool_])
def test_floats_alone_stay_unreduced(dtype):
    """Sums of integers are exact in any order, and are those of counts and of masks."""
    whole = Sharding.replicated(1, 8)
    split = Sharding.of_assignment(even_split(1, 0, 8), 8).splits[0]
    found = can_stay(Tile(np.zeros(4, dtype), whole.unreduced_over([split]), (4,)))
    assert found == np.issubdtype(dtype, np.inexact)
