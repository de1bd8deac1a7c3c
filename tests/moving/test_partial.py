"""Partial results, on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from gshard.graph.reason import Reason
from gshard.moving.partial import Reduce, identity
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Split


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
