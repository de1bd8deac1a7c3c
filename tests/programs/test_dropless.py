"""Experts without a capacity: rows travel to their experts and back, whatever the router says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent

M, F = 6, 10


def experts(x, expert, up, down):
    """Tokens through the experts that are said."""
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=up.shape[0])
    hidden = jnp.tanh(jax.lax.ragged_dot(x[order], up, sizes))
    y = jax.lax.ragged_dot(hidden, down, sizes)
    return jnp.zeros_like(x).at[order].set(y)


def trained(layer, x, expert, up, down):
    """A loss and all of its gradients."""

    def loss(x, up, down):
        y = layer(x, expert, up, down)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, up, down)


def arguments(tokens, count, routing, dtype=np.float32):
    """Tokens, the expert of each, and weights."""
    rng = np.random.default_rng(tokens * 31 + count)
    chosen = {
        "any": rng.integers(0, count, tokens),
        "one": np.full(tokens, count - 1),
        "few": rng.integers(0, max(1, count // 3), tokens),
        "equal": np.arange(tokens) % count,
    }[routing]
    return (
        random_array((tokens, M), dtype),
        chosen.astype(np.int32),
        random_array((count, M, F), dtype) / 3,
        random_array((count, F, M), dtype) / 3,
    )


def by_batch_and_expert(devices):
    """Tokens split by the batch, weights by expert."""
    return [
        even_split(2, 0, devices), even_split(1, 0, devices),
        even_split(3, 0, devices), even_split(3, 0, devices),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "routing", ["any", "one", *(pytest.param(r, marks=pytest.mark.slow) for r in ("few", "equal"))]
)
def test_forward_is_two_exchanges_of_the_tokens(routing):
    args = arguments(64, 8, routing)
    lowered = check(experts, *args, inputs=by_batch_and_expert(8))
    tokens = 64 // 8 * M * 4 * 7 // 8
    assert sent(lowered, "all_to_all") == 2 * tokens
    assert sent(lowered, "collective_permute") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "count", "routing", "devices"),
    [(29, 5, "any", 4), pytest.param(13, 11, "one", 3, marks=pytest.mark.slow)],
)
def test_gradients_for_sizes_that_do_not_divide(tokens, count, routing, devices):
    check_any_routing(tokens, count, routing, devices)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    tokens=st.sampled_from([8, 13, 29, 64]),
    count=st.sampled_from([2, 3, 5, 8, 11]),
    routing=st.sampled_from(["any", "one", "few", "equal"]),
    devices=st.sampled_from([2, 3, 4, 8]),
)
def test_values_and_gradients_for_any_routing(tokens, count, routing, devices):
    check_any_routing(tokens, count, routing, devices)


def check_any_routing(tokens, count, routing, devices):
    """Assert the values of a training step, the experts split by as many devices as they can be."""
    args = arguments(tokens, count, routing)
    count_of_tiles = min(devices, count)
    inputs = [*by_batch_and_expert(devices)[:2], *by_batch_and_expert(count_of_tiles)[2:]]
    check(functools.partial(trained, experts), *args, devices=devices, inputs=inputs)


def by_rows(between):
    """The experts, with `between` on the sorted rows: from rows, sizes and weights to results."""

    def layer(x, expert, up, down):
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=up.shape[0])
        y = between(x[order], expert, sizes, up, down)
        return jnp.zeros_like(x).at[order].set(y)

    return layer


def residual(x, expert, sizes, up, down):
    """A bias for all experts, and the rows themselves added."""
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x, up, sizes) + jnp.arange(F) / F)
    return jax.lax.ragged_dot(hidden, down, sizes) + x


def gated(x, expert, sizes, up, down):
    """One product for gate and values."""
    gate, hidden = jnp.split(jax.lax.ragged_dot(x, up, sizes), 2, axis=-1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * hidden, down[:, : F // 2], sizes)


def joined(x, expert, sizes, up, down):
    """Two products, joined; a part of each row, reversed, and padded again."""
    left, right = (jax.lax.ragged_dot(x, w, sizes) for w in jnp.split(up, 2, axis=2))
    hidden = jnp.concatenate([right, left], axis=1)[:, ::-1]
    hidden = jnp.pad(hidden[:, 1:-1], ((0, 0), (2, 0)))
    return jax.lax.ragged_dot(jnp.tanh(hidden), down, sizes)


def transposed(x, expert, sizes, up, down):
    """Rows in another dim."""
    hidden = jnp.cos(jax.lax.ragged_dot(x, up, sizes).T * jnp.arange(1.0, F + 1)[:, None])
    return jax.lax.ragged_dot(hidden.T, down, sizes)


def within_rows(x, expert, sizes, up, down):
    """Operators that run along a row."""
    hidden = jnp.cumsum(jax.lax.ragged_dot(x, up, sizes), axis=1)
    best, _ = jax.lax.top_k(hidden, 3)
    hidden = jnp.where(hidden >= best[:, -1:], hidden, 0)
    return jax.lax.ragged_dot(hidden, down, sizes)


def counted_twice(x, expert, sizes, up, down):
    """Equal sizes that are computed again, and rounded to bfloat16."""
    hidden = jax.lax.ragged_dot(x, up, sizes).astype(jnp.bfloat16)
    again = jnp.bincount(expert, length=up.shape[0])
    return jax.lax.ragged_dot(jax.nn.silu(hidden).astype(x.dtype), down, again)


def rematerialized(x, expert, sizes, up, down):
    """The products are computed again for the gradient."""

    def both(x):
        return jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x, up, sizes)), down, sizes)

    return jax.checkpoint(both)(x)


SPELLINGS = [residual, gated, joined, transposed, within_rows, counted_twice, rematerialized]


@pytest.mark.parametrize("between", [gated, transposed])
def test_rows_stay_with_their_experts_between_products(between):
    lowered = lowered_by_batch_and_expert(by_rows(between))
    assert sent(lowered, "all_to_all") == 2 * (64 // 8 * M * 4 * 7 // 8)
    assert largest_gather(lowered) <= 64 * 4  # indices, no rows


def lowered_by_batch_and_expert(layer):
    """A layer, lowered for 8 devices."""
    split = by_batch_and_expert(8)
    args = arguments(64, 8, "any")
    return gshard.jit(
        lambda *args: layer(*(gshard.shard(a, s) for a, s in zip(args, split, strict=True)))
    ).lower(*args)


@pytest.mark.slow
@pytest.mark.parametrize("between", SPELLINGS)
@pytest.mark.parametrize("routing", ["any", "one"])
def test_gradients_of_what_is_between_products(between, routing):
    layer = functools.partial(trained, by_rows(between))
    rounding = 2e-2 if between is counted_twice else 1e-4
    args, split = arguments(64, 8, routing), by_batch_and_expert(8)
    lowered = check(layer, *args, inputs=split, rtol=rounding, atol=rounding)
    rows = 64 // 8 * M * 4 * 7 // 8
    assert sent(lowered, "all_to_all") == 4 * rows
    assert largest_gather(lowered) <= 64 * 4


def top_k(x, router, up, down, bias, k=2):
    """Each token through its k best experts, weighted; biases by expert; summed by scatter."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), k)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=up.shape[0])
    rows = jnp.take(x, order // k, axis=0)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, up, sizes) + bias[flat[order]])
    y = jax.lax.ragged_dot(hidden, down, sizes) * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // k].add(y)


def top_k_by_inverse(x, router, up, down, bias, k=2):
    """The same by gathers alone, as others write it, and without biases."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), k)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=up.shape[0])
    hidden = jax.nn.silu(jax.lax.ragged_dot(jnp.repeat(x, k, axis=0)[order], up, sizes))
    y = jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]
    return jnp.einsum("tkm,tk->tm", y.reshape(-1, k, x.shape[1]), gates) + bias.sum()


def routed(tokens, count, dtype=np.float32):
    """Tokens, a router, weights and biases."""
    shapes = [(tokens, M), (M, count), (count, M, F), (count, F, M), (count, F)]
    return [(random_array(s, dtype) / 2).astype(dtype) for s in shapes]


def trained_router(layer, *args):
    """A loss and its gradients by everything."""

    def loss(*args):
        y = layer(*args)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return jax.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [top_k, pytest.param(top_k_by_inverse, marks=pytest.mark.slow)])
def test_top_k_sends_each_choice_of_each_token(layer):
    tokens = 64
    split = [even_split(2, 0, 8), None, even_split(3, 0, 8), even_split(3, 0, 8)]
    lowered = check(functools.partial(trained_router, layer), *routed(tokens, 8), inputs=split)
    rows = 2 * tokens // 8 * M * 4 * 7 // 8
    gates = {top_k: 2 * (2 * tokens // 8 * 4 * 7 // 8), top_k_by_inverse: 0}[layer]
    assert sent(lowered, "all_to_all") == 4 * rows + gates  # there and back, and gradients alike
    assert largest_gather(lowered) <= 2 * tokens * 4  # indices, no rows


def largest_gather(lowered):
    """Bytes of the largest value that is gathered; small ones may travel together."""
    values = [v for c in lowered.collectives for v in c.members or (c,) if c.kind == "all_gather"]
    return max(v.bytes for v in values)


def mesh_cases():
    mesh = np.arange(8).reshape(2, 4)
    columns = mesh.T[:, :1].reshape(4, 1, 1)
    return {
        "copies of experts": [np.arange(8).reshape(8, 1), None, columns, columns],
        "experts and hidden": [
            even_split(2, 0, 4), None, mesh.T.reshape(4, 1, 2), mesh.T.reshape(4, 2, 1),
        ],
        "tokens not split": [None, None, even_split(3, 0, 8), even_split(3, 0, 8)],
        "model dim split": [mesh.T.reshape(4, 2), None, columns, columns],
        "weights split otherwise": [
            even_split(2, 1, 8), None, np.arange(0, 8, 4).reshape(1, 1, 2), mesh.reshape(2, 1, 4),
        ],
        "experts on two and eight": [
            None, None, mesh.reshape(2, 1, 4), np.arange(8).reshape(8, 1, 1), even_split(2, 1, 8),
        ],
        "hidden of one and experts of the other": [
            mesh[:1], None, mesh[:1].reshape(1, 1, 4), mesh.T.reshape(4, 2, 1), even_split(2, 1, 8),
        ],
        "any order": [
            np.array([[3, 1, 0, 2, 7, 6, 5, 4]]).T, None,
            *[np.array([6, 1, 0, 3, 7, 2, 5, 4]).reshape(8, 1, 1)] * 2,
        ],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", mesh_cases())
def test_on_a_mesh(name):
    how = functools.partial(trained_router, top_k)
    check(how, *routed(37, 8), inputs=mesh_cases()[name])


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_layers_in_a_scan(remat):
    def layers(x, router, up, down, bias):
        def layer(x, weights):
            return x + top_k(x, *weights) / 4, None

        layer = jax.checkpoint(layer) if remat else layer
        stacked = [jnp.stack([w, w[::-1] / 2]) for w in (router, up, down, bias)]
        split = [gshard.split(w, 1, 8) if w.ndim == 4 else w for w in stacked]
        return jax.lax.scan(layer, x, split)[0]

    how = functools.partial(trained_router, layers)
    lowered = check(how, *routed(32, 8), inputs=[even_split(2, 0, 8)], rtol=1e-4, atol=1e-4)
    if remat:
        assert "all_to_all" in kinds(lowered)
        assert largest_gather(lowered) <= 64 * 4


@pytest.mark.slow
def test_bfloat16_and_a_sum_that_leaves_the_sorted_rows():
    def layer(x, expert, up, down):
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=up.shape[0])
        y = jax.lax.ragged_dot(x[order], up, sizes)
        return y.astype(jnp.float32).sum(0), y[::2], jnp.cumsum(y, 0)

    args = arguments(24, 4, "any", jnp.bfloat16)
    check(layer, *args, devices=4, inputs=by_batch_and_expert(4))


def test_collectives_say_what_unequal_numbers_cost():
    args = arguments(64, 8, "any")
    lowered = gshard.jit(
        lambda *args: experts(
            *(gshard.shard(a, s) for a, s in zip(args, by_batch_and_expert(8), strict=True))
        )
    ).lower(*args)
    more = [c for c in lowered.collectives if c.count == 0]
    assert {c.kind for c in more} == {"all_to_all", "collective_permute"}
    assert all("if" in c.reason and c.total_bytes == 0 for c in more)
    assert all(" x 0" in str(c) for c in more)
