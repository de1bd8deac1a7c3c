"""Gathers and scatters as rings of permutes: values, bytes, and what the forecast hides."""

import contextlib
import importlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import gshard
from gshard.graph.regions import walk
from gshard.moving.collectives import CollectivePermute
from gshard.moving.nodes import node_of
from tests.oracle import assert_same, kinds, random_array, run, sent
from tests.planning.improve.products import overlapped, split_products


def block(x, wi, wo):
    """A tensor-parallel feed-forward layer; rows are split outside it."""
    x = gshard.split(x, 0, 8)
    h = gshard.split(jax.nn.relu(x @ gshard.split(wi, 1, 8)), 1, 8)
    return gshard.split(h @ gshard.split(wo, 0, 8), 0, 8)


BLOCK = (64, 4), (4, 24), (24, 4)


def arrays(shapes):
    return [random_array(s, seed=i) for i, s in enumerate(shapes)]


@contextlib.contextmanager
def only_rings():
    """No pieces, so that all that can be a ring is one, however small."""
    with mock.patch.object(
        importlib.import_module("gshard.planning.improve.overlap"), "_COUNTS", ()
    ):
        yield


def test_values_and_bytes():
    """The gathered rows are also read by the gradient of `wi`, which sums over them."""

    def loss(*args):
        return jnp.sum(jnp.sin(block(*args)))

    step, args = jax.value_and_grad(loss, (0, 1, 2)), arrays(BLOCK)
    with only_rings():
        rings = gshard.jit(step, overlap=True)
        assert_same(run(rings, *args), jax.jit(step)(*args), rtol=1e-4, atol=1e-4)
        new = rings.lower(*args)
        assert gshard.check(rings, *args).ok
    assert sent(new) == sent(gshard.jit(step, overlap=False).lower(*args))
    # The loss is summed over devices.
    assert kinds(new).keys() == {"collective_permute", "all_reduce"}


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_both_directions(rows, devices):
    """One tile more in one direction where their number is even; an odd row in one direction."""

    def fn(x, w, v):
        x = gshard.split(x, 0, devices)
        h = gshard.split(x @ gshard.split(w, 1, devices), 1, devices)
        return gshard.split(h @ gshard.split(v, 0, devices), 0, devices)

    args = arrays([(rows * 3, 4), (4, 24), (24, 4)])
    with only_rings():
        rings = gshard.jit(fn, overlap=True, devices=jax.devices()[:devices])
        assert_same(run(rings, *args), jax.jit(fn)(*args), rtol=1e-4, atol=1e-4)
        program = rings.lower(*args)._program.history.programs["drop_unused"]
    sends = [node_of(e) for e in walk(program) if isinstance(node_of(e), CollectivePermute)]
    gathered = [n.groups[0] for n in sends if n.reason.kind == "operand"]
    summed = [n.groups[0] for n in sends if n.reason.kind != "operand"]
    ahead, behind = (0, 1), (0, devices - 1)
    odd = rows * 3 // devices % 2
    if devices > 2:  # else both directions are the same
        counts = gathered.count(ahead), gathered.count(behind)
        assert counts == (devices // 2, (devices - 1) // 2)
        assert summed.count(ahead) == devices - 1
    assert len(gathered) == devices - 1
    assert len(summed) == (devices - 1) * (1 if odd else 2)


@given(split_products())
def test_any_product(marked):
    """What cannot be a ring stays as it is."""
    with only_rings():
        overlapped(marked)


def test_chosen_by_the_forecast():
    """A large gather before a product: seven permutes, each beside a product of what is there."""

    def fn(x, w):
        return gshard.split(gshard.split(x, 0, 8) @ gshard.split(w, 1, 8), 1, 8)

    large = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16384, 8192), (8192, 28672))]
    small = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 32), (32, 64))]
    ring, gather = (
        gshard.jit(fn, overlap="auto", devices=8, hardware="h200").lower(*shapes)
        for shapes in (large, small)
    )
    assert [c.kind for c in ring.collectives] == ["collective_permute"] * 7
    assert all(c.overlapped_with for c in ring.collectives)
    assert kinds(gather).keys() == {"all_gather"}
    plain = gshard.jit(fn, overlap=False, devices=8, hardware="h200").lower(*large)
    saved = plain.forecast("h200").step_seconds - ring.forecast("h200").step_seconds
    assert saved > 0.5 * plain.forecast("h200").exposed_seconds
