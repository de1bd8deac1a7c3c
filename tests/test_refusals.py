"""What gshard refuses: each refusal says where, why, and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gshard
from gshard.rules import REGIONS
from tests.rules.test_unknown import new_primitive

UNKNOWN = new_primitive("nobody_knows", lambda x: x * 2)
CALLING = Primitive("calling")  # its parameter is a program
CALLING.def_abstract_eval(lambda x, *, jaxpr: ShapedArray(x.shape, x.dtype))
mlir.register_lowering(CALLING, lambda ctx, x, *, jaxpr: [x])

# Primitives that have a rule which refuses. All others with a rule run.
REFUSED = {
    "axis names": {
        "all_gather", "all_gather_invariant", "all_to_all", "axis_index", "pbroadcast", "pmax",
        "pmin", "ppermute", "psum", "psum_invariant", "ragged_all_to_all", "reduce_scatter",
    },
    "tokens": {"after_all", "create_token"},
    "a derivative": {"custom_lin"},
}  # fmt: skip


def parts():
    return np.arange(8)


def manual_inside(x):
    def body(v):
        part = gshard.auto_to_manual_spmd_partition(gshard.shard(v, parts()))
        return gshard.manual_to_auto_spmd_partition(part, parts())

    return CALLING.bind(x, jaxpr=jax.make_jaxpr(body)(x))


def some_devices(x):
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    return jax.shard_map(lambda v: lax.psum(v, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())(x)


def annotated_inside(x):
    return gshard.split(gshard.auto_to_manual_spmd_partition(gshard.shard(x, parts())), 0, 1)


def returns_a_part(x):
    return gshard.auto_to_manual_spmd_partition(gshard.shard(x, parts()))


REFUSALS = {
    "a manual region in an unknown primitive": (manual_inside, "put the region around it"),
    "shard_map on some devices": (some_devices, "its mesh has to have all 8 devices"),
    "an annotation in a manual region": (annotated_inside, "manual_to_auto_spmd_partition first"),
    "too many partitions": (lambda x: gshard.split(x, 0, 9), "at most 8 partitions are allowed"),
    "devices that are not there": (lambda x: gshard.shard(x, [8, 9]), "numbered 0 to 7"),
    "a dim that is not there": (lambda x: gshard.split(x, 1, 8), "allowed: -1 to 0"),
    "a sharding of JAX's": (
        lambda x: gshard.shard(x, jax.P("x")),
        "takes an array of device ids; jax.lax.with_sharding_constraint takes JAX's shardings",
    ),
    "a device twice": (lambda x: gshard.shard(x, [1, 1]), "named more than once"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_where_and_what_to_do(name):
    fn, instead = REFUSALS[name]
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=instead) as refusal:
        gshard.jit(lambda x: fn(x)).lower(np.ones(8, np.float32))
    assert "test_refusals.py:" in str(refusal.value)


def test_strict_refuses_what_would_run_whole():
    with pytest.raises(NotImplementedError, match=r"test_refusals.py:\d+.*gshard.register_rule"):
        gshard.jit(lambda x: UNKNOWN.bind(x), strict=True).lower(np.ones(8, np.float32))
    np.testing.assert_array_equal(gshard.jit(lambda x: UNKNOWN.bind(x))(np.ones(8)), np.full(8, 2))


def test_every_rule_that_refuses_is_known():
    told: dict[str, set[str]] = {why: set() for why in REFUSED}
    for primitive, rule in REGIONS.items():
        if rule.doc.refused:
            (why,) = [w for w in REFUSED if w in rule.doc.refused]
            told[why].add(primitive.name)
    assert told == REFUSED


def test_values_of_manual_regions_do_not_leave_them():
    with pytest.raises(ValueError, match="manual_to_auto_spmd_partition, which says which part"):
        gshard.jit(returns_a_part).lower(np.ones(8, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_what_was_refused_once_runs(dtype):
    """References, platforms, vmapped loops, unknown primitives: none of them is a refusal."""

    def fn(x):
        ref = jax.new_ref(x)
        ref[0] += 1
        loop = jax.vmap(lambda v: lax.while_loop(lambda c: c < 5, lambda c: c + 1, v))
        return loop(UNKNOWN.bind(ref[...])), jnp.diag(x)

    x = np.arange(8).astype(dtype)
    got = gshard.jit(lambda x: fn(gshard.split(x, 0, 8)))(x)
    for a, b in zip(got, jax.jit(fn)(x), strict=True):
        np.testing.assert_array_equal(a, b)
