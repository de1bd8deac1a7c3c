"""`examples/tiny.py` computes what JAX computes, and sends what gshard sends."""

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import gshard
from examples import tiny

SIZES = {"x": 4, "y": 2}
DEVICES = np.arange(8).reshape(4, 2)


def by_gshard(value, *axes):
    """`tiny.annotate`, for gshard: the devices of each tile."""
    if not any(axes):
        return gshard.replicate(value)
    used = [axis for axis in SIZES if axis in axes]
    kept = DEVICES[tuple(slice(None) if axis in axes else slice(1) for axis in SIZES)]
    order = sorted(used, key=axes.index)
    squeezed = kept.reshape([SIZES[axis] for axis in used])
    turned = squeezed.transpose([used.index(axis) for axis in order])
    return gshard.shard(value, turned.reshape([SIZES.get(axis, 1) for axis in axes]))


def data_parallel(at, x, w):
    return jnp.sum(jnp.tanh(at(x, "x", None) @ w) ** 2)


def tensor_parallel(at, x, w, v):
    return jax.nn.relu(x @ at(w, None, "x")) @ at(v, "x", None)


def squared(at, *args):
    return jnp.sum(tensor_parallel(at, *args) ** 2)


def both(at, x, w, v):
    return jax.nn.relu(at(x, "y", None) @ at(w, None, "x")) @ v


def fsdp(at, x, w):
    return jnp.sum(jnp.tanh(at(x, "x", None) @ at(w, "x", None)) ** 2)


def contracted(at, x, w):
    return at(x, None, "x") @ at(w, "x", None)


def scattered(at, x, w):
    return at(at(x, None, "x") @ at(w, "x", None), "x", None)


def exchanged(at, x):
    return at(jnp.tanh(at(x, "x", None)), None, "x")


def gathered(at, x):
    return at(jnp.tanh(at(x, "x", None)), None, None)


def sliced(at, x):
    return at(jnp.tanh(at(x, None, None)), "x", "y")


def turned(at, x):
    return at(x, "x", None).T * 2


def rows_summed(at, x):
    return jnp.sum(at(x, "x", "y"), 0)


def largest(at, x):
    return jnp.max(at(x, "x", None) * 2, 0)


def softmax(at, x):
    return jax.nn.softmax(at(x, "x", None), -1)


def normalized(at, x):
    x = at(x, "x", None)
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def heads(at, x, w):
    q = (at(x, "x", None) @ w).reshape(x.shape[0], 4, -1)
    return jnp.einsum("shd,thd->hst", q, q)


def heads_split(at, x, w):
    q = (x @ at(w, None, "x")).reshape(x.shape[0], 4, -1)
    scores = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, q), -1)
    return jnp.einsum("hst,thd->shd", scores, q).reshape(x.shape[0], -1)


def batched(at, x, w):
    return jnp.einsum("eab,ebc->eac", at(x, "x", None, None), at(w, "x", None, None))


def experts(at, x, w):
    x = at(jnp.einsum("gem->egm", at(x, "x", None, None)), "x", None, None)
    return jnp.einsum("egm,emh->egh", x, at(w, "x", None, None))


def gradient(fn, *wanted):
    return lambda at, *args: jax.grad(lambda *a: fn(at, *a), wanted)(*args)


PROGRAMS = {
    "data parallel": (data_parallel, (64, 32), (32, 48)),
    "data parallel, gradient": (gradient(data_parallel, 1), (64, 32), (32, 48)),
    "data parallel, 61 rows": (data_parallel, (61, 32), (32, 48)),
    "data parallel, 61 rows, gradient": (gradient(data_parallel, 1), (61, 32), (32, 48)),
    "tensor parallel": (tensor_parallel, (64, 32), (32, 64), (64, 32)),
    "tensor parallel, gradient": (gradient(squared, 1, 2), (64, 32), (32, 64), (64, 32)),
    "tensor parallel, 30 units": (tensor_parallel, (64, 32), (32, 30), (30, 32)),
    "data x tensor": (both, (64, 32), (32, 64), (64, 32)),
    "FSDP": (fsdp, (512, 32), (32, 48)),
    "FSDP, 30 rows": (fsdp, (512, 30), (30, 48)),
    "contraction split": (contracted, (64, 32), (32, 48)),
    "contraction split, 31": (contracted, (64, 31), (31, 48)),
    "ReduceScatter": (scattered, (64, 32), (32, 48)),
    "AllToAll": (exchanged, (64, 32)),
    "AllGather": (gathered, (64, 32)),
    "AllGather, 61 rows": (gathered, (61, 32)),
    "slices": (sliced, (64, 32)),
    "transpose": (turned, (61, 32)),
    "sum over a split dim": (rows_summed, (61, 31)),
    "maximum over a split dim": (largest, (61, 32)),
    "softmax": (softmax, (61, 32)),
    "normalization": (normalized, (64, 32)),
    "attention, rows split": (heads, (64, 32), (32, 32)),
    "attention, heads split": (heads_split, (64, 32), (32, 32)),
    "batched product": (batched, (8, 16, 32), (8, 32, 16)),
    "experts": (experts, (8, 8, 32), (8, 32, 16)),
}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), tuple(SIZES))


def given(shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def sent(moves):
    """Bytes by kind of collective."""
    found = Counter()
    for kind, size in moves:
        found["all_reduce" if kind == "all_max" else kind] += size
    return {kind: size for kind, size in found.items() if size}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_sends_what_gshard_sends(name, mesh):
    fn, *shapes = PROGRAMS[name]
    args = given(shapes)
    program = tiny.Partitioned(lambda *a: fn(tiny.annotate, *a), mesh, *args)
    lowered = gshard.jit(lambda *a: fn(by_gshard, *a)).lower(*args)
    assert sent((m.kind, m.sent) for m in program.moves) == sent(
        (c.kind, c.bytes * c.count) for c in lowered.collectives
    )


@pytest.mark.parametrize(
    "name",
    [
        name if "gradient" in name or "61" in name else pytest.param(name, marks=pytest.mark.slow)
        for name in PROGRAMS
    ],
)
def test_values(name, mesh):
    fn, *shapes = PROGRAMS[name]
    with jax.enable_x64(True):  # sums of 20,000 that nearly cancel
        args = given(shapes)
        got = tiny.Partitioned(lambda *a: fn(tiny.annotate, *a), mesh, *args)(*args)
        expected = jax.tree.leaves(fn(lambda v, *_: v, *args))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_reasons_name_the_line(mesh):
    x, w = given([(64, 32), (32, 48)])
    (move,) = tiny.Partitioned(lambda x, w: contracted(tiny.annotate, x, w), mesh, x, w).moves
    line = contracted.__code__.co_firstlineno + 1
    assert move.reason == f"result of dot_general at test_tiny.py:{line}"


def test_an_operator_that_it_does_not_have(mesh):
    (x,) = given([(64, 32)])
    with pytest.raises(NotImplementedError, match=r"test_tiny.py:\d+: slice is not in tiny"):
        tiny.Partitioned(lambda x: x[:3], mesh, x)


def test_it_is_read_in_one_sitting():
    assert len(Path(tiny.__file__).read_text().splitlines()) <= 400
