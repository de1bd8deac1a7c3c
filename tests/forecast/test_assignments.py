"""Appendix A.3: a 2 x 4 split that communicates along its rows, under two device assignments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.forecast import Switch, Torus

ROWS = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
COLUMNS = np.array([[0, 2, 4, 6], [1, 3, 5, 7]])
AROUND = np.array([[0, 1, 3, 2], [4, 5, 7, 6]])  # along the edges of a cube's faces


def torus(*shape, wrap=True):
    return Torus(shape, tuple(wrap and n > 2 for n in shape), 1, 82e9, 1e-6)


# For each topology the assignment that suits it, and one that suits another.
CASES = {
    "2 x 4 torus": (torus(2, 4), ROWS, COLUMNS),
    "4 x 2 torus": (torus(4, 2), COLUMNS, ROWS),
    "2 x 4 mesh": (torus(2, 4, wrap=False), ROWS, COLUMNS),
    "4 x 2 mesh": (torus(4, 2, wrap=False), COLUMNS, ROWS),
    "2 x 2 x 2 torus": (torus(2, 2, 2), AROUND, ROWS),
    "nodes of 4": (Switch(8, 4, 450e9, 50e9, 3e-6, 10e-6), ROWS, COLUMNS),
}


def seconds(assignment, topology):
    def shifted(x):
        x = gshard.shard(x, assignment)
        ahead = jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]  # every row, one column on
        return gshard.shard(x - ahead, assignment)

    lowered = gshard.jit(shifted, devices=8).lower(jax.ShapeDtypeStruct((4096, 4096), jnp.float32))
    assert {c.kind for c in lowered.collectives} == {"collective_permute"}
    links = lowered.forecast(hardware="tpu-v5e", topology=topology).operators
    return sum(t.link_seconds for t in links)


@pytest.mark.parametrize("name", CASES)
def test_the_forecast_prefers_the_assignment_that_suits_the_topology(name):
    topology, right, wrong = CASES[name]
    assert seconds(right, topology) < seconds(wrong, topology)
