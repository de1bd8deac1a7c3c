"""What is sent once is not sent again; plan in, plan out."""

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard import manual
from gshard.moving.nodes import node_of
from tests.oracle import check, even_split, kinds


def nodes(jaxpr):
    return [node_of(eqn).name for eqn in jaxpr.eqns if node_of(eqn)]


def stages(fn, *arguments):
    lowered = gshard.jit(fn).lower(*arguments)
    return lowered._program.history.programs


def test_windows_that_are_asked_for_twice():
    """Two convolutions of one tensor need the same halo."""

    def image(x, k):
        x = gshard.split(x, 2, 8)
        return jax.lax.conv(x, k, (1,), "SAME") + jax.lax.conv(x, 2 * k, (1,), "SAME")

    found = stages(image, jnp.ones((1, 4, 32)), jnp.ones((4, 4, 3)))
    assert nodes(found["plan"]).count("halo") == 2
    assert nodes(found["share"]).count("halo") == 1


def test_values_and_collectives():
    def fn(x, k):
        return jax.lax.conv(x, k, (1,), "SAME") + jax.lax.conv(x, 2 * k, (1,), "SAME")

    x, k = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(1, 4, 32), (4, 4, 3)]))
    lowered = check(
        fn, x.astype(np.float32), k.astype(np.float32), inputs=[even_split(3, 2, 8)], rtol=1e-4
    )
    assert kinds(lowered) == {"collective_permute": 2}


def test_windows_that_are_asked_for_twice_in_a_loop():
    def image(x, k):
        def step(x, _):
            x = gshard.split(x, 2, 8)
            both = jax.lax.conv(x, k, (1,), "SAME") + jax.lax.conv(x, 2 * k, (1,), "SAME")
            return both, None

        return jax.lax.scan(step, x, None, length=3)[0]

    found = stages(image, jnp.ones((1, 4, 32)), jnp.ones((4, 4, 3)))
    (body,) = [eqn.params["jaxpr"].jaxpr for eqn in found["share"].eqns if "jaxpr" in eqn.params]
    assert nodes(body).count("halo") == 1


def test_collectives_of_a_manual_region_stay():
    """The user wrote both."""

    def both(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, 8))
        total = manual.all_reduce(part) * manual.all_reduce(part)
        return gshard.manual_to_auto_spmd_partition(total, even_split(1, 0, 8))

    assert nodes(stages(both, jnp.ones(16))["share"]) == ["all-reduce", "all-reduce"]
