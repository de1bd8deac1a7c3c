"""The history of a lowering."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gshard.graph.history import History


def forgetful(closed):
    """A pass that loses the first equation of a loop's body."""
    (loop,) = (eqn for eqn in closed.eqns if "jaxpr" in eqn.params)
    body = loop.params["jaxpr"]
    body = body.replace(jaxpr=body.jaxpr.replace(eqns=body.eqns[1:]))
    eqns = [e.replace(params=e.params | {"jaxpr": body}) if e is loop else e for e in closed.eqns]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns))


def test_a_pass_that_leaves_a_value_unmade_is_named():
    """As in every program that the tests lower: see tests/conftest.py."""
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (jnp.sin(c) + c, None), x, None, 2))(
        1.0
    )
    with pytest.raises(AssertionError, match=r"forgetful: nothing makes .*, read by .* add"):
        History().run((forgetful,), closed)
