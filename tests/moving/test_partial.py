"""Partial results, on their own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from gshard.graph.reason import Reason
from gshard.moving.costs import GENERIC_COSTS, use_cost_model
from gshard.moving.nodes import planned_bytes
from gshard.moving.partial import Reduce, combine, combine_cost
from gshard.moving.plan import reshard
from gshard.moving.reductions import identity
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile


@pytest.mark.parametrize(("kind", "wanted"), [("sum", 7), ("prod", 8), ("max", 4)])
def test_copies_of_a_part_count_once_where_devices_are_idle(kind, wanted):
    """Three parts, each on two of eight devices; the last two hold nothing and get the result."""
    split = Split.of([0, 1, 2, 0, 1, 2, -1, -1])
    values = np.array([1, 2, 4, 1, 2, 4, 9, 9], np.int32)
    parts = Sharding.replicated(1, 8).unreduced_over([split])

    def local(x):
        place = Place(("d",), 8, planned=False)
        return Reduce(Reason("step", "test"), parts, (1,), kind, None).run(place, x)

    mesh, spec = Mesh(np.array(jax.devices()), "d"), PartitionSpec("d")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(jnp.asarray(values)), np.full(8, wanted))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.float32, np.bool_])
def test_the_identity_of_a_reduction_changes_nothing(dtype):
    numbers = np.dtype(dtype).kind in "iu"
    ends = [np.iinfo(dtype).min, np.iinfo(dtype).max] if numbers else [0, 1]
    x = np.array([*ends, 1, 0], dtype)
    ways = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    if np.dtype(dtype).kind in "iub":
        ways |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    for kind, op in ways.items():
        np.testing.assert_array_equal(op(x, np.asarray(identity(kind, dtype))), x)


@st.composite
def reductions(draw):
    """An unreduced value, a kind of reduction, a wanted sharding, a shape and a type."""
    devices = draw(st.sampled_from([2, 3, 4, 6, 8]))
    tiles = draw(st.sampled_from(range(2, devices + 1)))
    order = draw(st.permutations(range(devices)))
    over = np.full(devices, -1)
    copies = devices // tiles
    over[list(order)[: tiles * copies]] = np.repeat(np.arange(tiles), copies)
    shape = draw(st.sampled_from([(), (4,), (7, 3), (8, 16), (1, 5)]))
    here = Sharding.replicated(len(shape), devices)
    if shape and copies > 1:
        rows = np.full(devices, -1)
        rows[list(order)[: tiles * copies]] = np.tile(np.arange(copies), tiles)
        finer = here.replace(0, Split.of(rows))
        if not finer.idle and draw(st.booleans()):
            here = finer
    target = here
    if shape and draw(st.booleans()):
        split = Split.of(draw(st.sampled_from([np.arange(devices), np.argsort(order)])))
        target = Sharding((*[None] * (len(shape) - 1), split), devices)
    kinds = ["sum float32", "sum bool", "sum bfloat16", "max float32", "min complex64", "max bool"]
    kinds += ["max float8_e4m3fn", "and bool", "or int32", "prod float32", "xor uint8"]
    kinds += ["tree float32"] * (tiles * copies == devices and tiles in (2, 4, 8))
    kind, dtype = draw(st.sampled_from(kinds)).split()
    return here.unreduced_over([Split.of(over)]), kind, target, shape, jnp.dtype(dtype)


@given(reductions())
def test_a_reduction_costs_what_its_nodes_send(case):
    """The price of a way to run an operator is that of the nodes that a plan gets for it."""
    here, kind, target, shape, dtype = case

    def run(x, device):
        place = Place((), here.num_devices).numbered(device)
        done = combine(place, Tile(x, here, shape), kind, target)
        return reshard(place, done, target, Reason("step", "test")).array

    local = jax.ShapeDtypeStruct(here.local_shape(shape), dtype)
    with use_cost_model(replace(GENERIC_COSTS, latency=0.0)):
        plan = jax.make_jaxpr(run)(local, jax.ShapeDtypeStruct((), jnp.int32)).jaxpr
        wanted = jax.ShapeDtypeStruct(shape, dtype)
        assert combine_cost(here, kind, target, wanted) == planned_bytes(plan)
