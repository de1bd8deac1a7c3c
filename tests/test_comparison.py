"""docs/explanation/comparison.md: every row has a test or a source, and what it says of JAX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from tests.documents import ROOT

PAGE = ROOT / "docs" / "explanation" / "comparison.md"
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if "|" in line][2:]


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_has_a_test_or_a_source(row):
    shown = row[-1]
    tests = re.findall(r"`(tests/[\w/.]+)`", shown)
    assert all((ROOT / path).exists() for path in tests)
    assert tests or "](" in shown


def test_sizes_that_do_not_divide(mesh):
    """An error of `jax.jit` and of `shard_map`; split by gshard."""
    x = np.arange(13.0, dtype=np.float32)
    doubled = jax.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match="partitioned 8 times"):
        doubled(x)
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match="divisible"):
        mapped(x)
    ours = gshard.jit(lambda x: gshard.split(x, 0, 8) * 2)(x)
    assert isinstance(ours, gshard.UnevenArray)
    np.testing.assert_array_equal(np.asarray(ours), x * 2)


def test_fewer_partitions_than_devices():
    """Three tiles on eight devices: no product of the axes of a mesh of eight."""
    lowered = gshard.jit(lambda x: gshard.split(x, 0, 3) * 2).lower(jnp.arange(12.0))
    assert lowered.out_shardings.tiles == (3,)
    assert not lowered.collectives


def test_arrays_in_different_device_orders(mesh):
    """An error of `jax.jit`; gshard reshards, and lists that."""
    backwards = Mesh(np.array(jax.devices()[::-1]), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("x")))
    y = jax.device_put(jnp.arange(16.0), NamedSharding(backwards, P("x")))
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda x, y: x + y)(x, y)

    def add(x, y):
        return gshard.shard(x, np.arange(8)) + gshard.shard(y, np.arange(8)[::-1])

    step = gshard.jit(add)
    assert [c.kind for c in step.lower(x, y).collectives] == ["collective_permute"]
    np.testing.assert_array_equal(np.asarray(step(x, x)), 2 * np.arange(16.0))
