"""Partial results, on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from gshard.graph.reason import Reason
from gshard.moving.partial import Reduce
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Split


@pytest.mark.parametrize(("kind", "wanted"), [("sum", 7), ("prod", 8), ("max", 4)])
def test_copies_of_a_part_count_once_where_devices_are_idle(kind, wanted):
    """Three parts, each on two of eight devices; the last two hold nothing and get the result."""
    split = Split.of([0, 1, 2, 0, 1, 2, -1, -1])
    values = np.array([1, 2, 4, 1, 2, 4, 9, 9], np.int32)
    whole = Sharding.replicated(1, 8)

    def local(x):
        return Reduce(Reason("step", "test"), whole, (1,), (split,), kind, None).run(
            Place(("d",), 8), x
        )

    mesh, spec = Mesh(np.array(jax.devices()), "d"), PartitionSpec("d")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(jnp.asarray(values)), np.full(8, wanted))
