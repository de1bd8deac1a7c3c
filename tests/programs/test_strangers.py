"""Training steps of other models than the recipes': the bytes of an expert, and the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from examples.recipes.recipe import all_gather, all_reduce, nbytes, reduce_scatter
from tests.oracle import assert_same, run
from tests.programs import strangers

MODELS = {
    "llama": strangers.llama(),
    "llama in a scan": strangers.llama(scan=True),
    "mixer": strangers.mixer(),
    "lstm": strangers.lstm(),
    "state space": strangers.state_space(),
}
BATCHES = 2  # over which gradients are accumulated


def largest_dim(path, w, count):
    """The dim that a user would split: the largest that divides, and not that of a loop."""
    stacked = w.ndim == 3 and path[0].key == "layers"
    dims = [d for d in range(stacked, w.ndim) if w.shape[d] % count == 0]
    return max(dims, key=lambda d: w.shape[d]) if dims else None


def split_weights(params, parts):
    """Every weight in `parts`, with copies where there are more devices."""

    def place(path, w):
        dim = largest_dim(path, w, parts)
        if dim is None:
            return gshard.replicate(w)
        tiles = [1] * w.ndim
        tiles[dim] = parts
        return gshard.shard(w, np.arange(parts).reshape(tiles))

    return jax.tree_util.tree_map_with_path(place, params)


def training(model, parts, devices, accumulate=False):
    """A step of gradient descent; `parts` of the weights, or 1 for all of them everywhere."""
    loss, params, batch = MODELS[model]

    def split_batch(batch):
        return jax.tree.map(lambda x: gshard.split(x, 0, devices), batch)

    def gradient(params, batch):
        if not accumulate:
            return jax.grad(loss)(params, split_batch(batch))

        def add(total, batch):
            found = jax.grad(loss)(params, split_batch(batch))
            return jax.tree.map(jnp.add, total, found), None

        parts = jax.tree.map(lambda x: x.reshape(BATCHES, -1, *x.shape[1:]), batch)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]

    def step(params, batch):
        if parts > 1:
            params = split_weights(params, parts)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient(params, batch))
        return split_weights(new, parts) if parts > 1 else new

    return step, params, batch


def expert(model, parts, devices, accumulate):
    """Weights gathered before their use and gradients scattered after it; copies summed too."""
    _, params, _ = MODELS[model]
    size = nbytes(params)
    if parts == 1:
        return all_reduce(size, devices)
    moved = all_gather(size, parts) + reduce_scatter(size, parts)
    if "scan" in model:  # a layer's weights are gathered in the loop, and again in the way back
        again = all_gather(nbytes(params["layers"]), parts)
        moved += again + (BATCHES - 1) * 2 * again * accumulate
    return moved + all_reduce(size / parts, devices // parts)


CASES = [
    ("llama", 6, 6, False),
    ("llama in a scan", 1, 8, True),
    ("mixer", 2, 8, False),
    ("lstm", 8, 8, False),
    ("state space", 4, 8, False),
]
MORE = [
    (model, parts, 8, accumulate)
    for model in MODELS
    for parts in (1, 4, 8)
    for accumulate in (False, True)
]


def check_bytes(model, parts, devices, accumulate):
    step, params, batch = training(model, parts, devices, accumulate)
    lowered = gshard.jit(step, devices=devices).lower(params, batch)
    sent = sum(c.total_bytes for c in lowered.collectives)
    assert sent <= 1.05 * expert(model, parts, devices, accumulate)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_an_expert(case):
    check_bytes(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in MORE if c not in CASES], ids=str)
def test_bytes_of_an_expert_everywhere(case):
    check_bytes(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [("lstm", 8, 8, True), ("state space", 4, 8, True)], ids=str)
def test_values(case):
    step, params, batch = training(*case)
    rng = np.random.default_rng(0)

    def draw(x):
        if np.issubdtype(x.dtype, np.integer):
            return rng.integers(0, 24, x.shape).astype(x.dtype)
        return (rng.normal(size=x.shape) / 8).astype(x.dtype)

    arguments = jax.tree.map(draw, (params, batch))
    close = {"rtol": 2e-3, "atol": 2e-4}
    assert_same(run(gshard.jit(step), *arguments, **close), jax.jit(step)(*arguments), **close)


def test_constants_of_a_loop_are_gathered_in_it_where_memory_is_short():
    step, params, batch = training("lstm", 8, 8)
    lowered = gshard.jit(step, devices=8, memory_limit=2**16).lower(params, batch)
    assert max(c.count for c in lowered.collectives) == 12
