"""Propagation where splits conflict: what it costs over the whole program decides."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent

B, S, V, M, F = 32, 64, 512, 64, 256


def lookup_scale_project(tokens, table, scale, w):
    """Tokens and weights all split, as in FSDP: the scale's split reaches the activations first."""
    tokens, table, scale, w = (gshard.split(a, 0, 8) for a in (tokens, table, scale, w))
    return table[tokens] * scale @ w


def arguments(batch=B):
    tokens = random_array((batch, S), np.int32) % V
    return tokens, random_array((V, M)), random_array((M,)), random_array((M, F))


def test_a_small_tensor_does_not_take_over_a_large_one():
    lowered = gshard.jit(lookup_scale_project).lower(*arguments())
    assert str(lowered.out_shardings) == "split dim 0 by 8"
    weights = (M + M * F) * 4 * 7 // 8
    looked_up = min(V * M, B * S * M) * 4 * 7 // 8
    assert sent(lowered) <= weights + 2 * looked_up
    np.testing.assert_allclose(
        gshard.jit(lookup_scale_project)(*arguments()),
        lookup_scale_project(*arguments()),
        rtol=1e-4,
        atol=1e-4,
    )


def test_where_the_weights_are_larger_they_stay():
    """With few tokens it is the activations that move."""

    def fn(x, scale, w):
        x, scale, w = (gshard.split(a, 0, 8) for a in (x, scale, w))
        return jnp.tanh(x * scale) @ w

    few = random_array((8, 1024)), random_array((1024,)), random_array((1024, 1024))
    many = random_array((4096, 64)), random_array((64,)), random_array((64, 64))
    assert sent(gshard.jit(fn).lower(*few)) < 8 * 1024 * 4 * 3
    assert kinds(gshard.jit(fn).lower(*many)) == {"all_gather": 2}


def fsdp(cut):
    """A training step of a hidden layer; `cut` is around its parts."""

    def block(x, scale, up, down):
        hidden = cut(lambda x, up: jax.nn.relu(x @ up))(x * scale, up)
        return x + cut(jnp.matmul)(hidden, down)

    def loss(weights, x):
        for layer in weights:
            x = cut(block)(x, *layer)
        return jnp.mean(x**2)

    def step(weights, x):
        weights, x = jax.tree.map(lambda a: gshard.split(a, 0, 8), (weights, x))
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, grads)

    layer = random_array((M,)), random_array((M, F)), random_array((F, M))
    return gshard.jit(step).lower([layer, layer], random_array((B * S, M)))


def test_how_the_function_is_cut_into_jitted_parts_does_not_matter():
    whole, cut = fsdp(lambda f: f), fsdp(jax.jit)
    assert [str(s) for s in jax.tree.leaves(whole.out_shardings)] == [
        str(s) for s in jax.tree.leaves(cut.out_shardings)
    ]
    assert [(c.kind, c.bytes) for c in whole.collectives] == [
        (c.kind, c.bytes) for c in cut.collectives
    ]
    weights = 2 * (M + 2 * M * F) * 4 * 7 // 8
    assert sent(whole) == 2 * weights


@pytest.mark.parametrize("sizes", [(1024, 1024, 64, 8), (1000, 1001, 53, 7), (1001, 10001, 53, 7)])
def test_what_is_shared_is_weighed_once(sizes):
    """Tied weights: used and used transposed, with two gradients that are added.

    In the last case the batch would have to be moved for its second use, but not for its first.
    """
    rows, width, hidden, devices = sizes

    def loss(weights, x):
        w, b, c = weights
        return jnp.mean((jnp.tanh(x @ w + b) @ w.T + c - x) ** 2)

    def step(weights, x):
        weights, x = jax.tree.map(lambda a: gshard.split(a, 0, devices), (weights, x))
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: gshard.split(w - g, 0, devices), weights, grads)

    shapes = [(width, hidden), (hidden,), (width,), (rows, width)]
    *weights, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    lowered = gshard.jit(step, devices=devices).lower(weights, x)
    tiles = sum(-(-w.shape[0] // devices) * w.size // w.shape[0] for w in weights)
    assert sent(lowered) == 2 * tiles * 4 * (devices - 1)
    assert set(kinds(lowered)) == {"all_gather", "reduce_scatter"}


def test_layers_in_a_loop_go_like_layers_in_a_row():
    def step(weights, x):
        weights = jax.tree.map(lambda a: gshard.split(a, 1, 8), weights)
        x = gshard.split(x, 0, 8)

        def layer(x, weights):
            scale, up, down = weights
            return x + jax.nn.relu(x * scale @ up) @ down, None

        def loss(weights):
            return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    shapes = [(3, M), (3, M, F), (3, F, M)]
    lowered = gshard.jit(step).lower([random_array(s) for s in shapes], random_array((B * S, M)))
    weights = 3 * (M + 2 * M * F) * 4 * 7 // 8
    assert sent(lowered, "reduce_scatter") == weights
    assert sent(lowered, "all_gather") <= 2 * weights
    assert set(kinds(lowered)) == {"all_gather", "reduce_scatter"}


@pytest.mark.slow
def test_hash_order_does_not_matter():
    script = (
        "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"
        "from tests.propagation.test_conflicts import fsdp\n"
        "import hashlib; print(hashlib.sha1(fsdp(jax.jit).as_text().encode()).hexdigest())"
    )
    found = set()
    for seed in ("0", "1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        found.add(run.stdout.strip())
    assert len(found) == 1


def test_a_conflict_names_what_lost_and_what_it_would_have_cost():
    """With many tokens their split goes first, and the scale's loses."""
    (conflict,) = gshard.jit(lookup_scale_project).lower(*arguments()).conflicts
    assert conflict.kept.startswith(f"dim 0 by 8 of i32[{B},{S}] (")
    assert conflict.lost.startswith("dim 0 by 8 of f32[")
    assert "test_conflicts.py:" in conflict.kept
    assert "test_conflicts.py:" in conflict.lost
    assert conflict.cost < conflict.instead
    assert f"costs {conflict.instead / conflict.cost:.3g} times" in str(conflict)


def weighted(apart):
    """Forces, by a difference that is used twice."""
    return apart / (1 + (apart**2).sum(-1, keepdims=True))


PAIRS = {
    "by columns first": lambda x, y: weighted(x[None] - y[:, None]).sum(1),
    "by rows first": lambda x, y: weighted(x[:, None] - y[None]).sum(1),
    "summed over rows": lambda x, y: weighted(x[:, None] - y[None]).sum(0),
    "by vmap": lambda x, y: jax.vmap(
        lambda a: jax.vmap(lambda b: weighted(a - b))(x).sum(0), out_axes=0
    )(y),
    "attention": lambda x, y: jax.nn.softmax(-weighted(x[:, None] - y[None]).sum(-1), 1) @ x,
}


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_split_by_the_row_that_is_cheaper(name, twice):
    """All rows are sent to every device, and nothing else, whichever operand is first."""

    def fn(x):
        one = gshard.split(x, 0, 8)
        return PAIRS[name](one, gshard.split(x, 0, 8) if twice else one)

    x = random_array((510, 3))
    lowered = gshard.jit(fn).lower(x)
    assert kinds(lowered) == {"all_gather": 1}
    assert sent(lowered) == 64 * 3 * 4 * 7
    (conflict, *_) = lowered.conflicts
    assert conflict.cost < conflict.instead
    assert "by 8 of f32[510" in conflict.kept
    assert "test_conflicts.py:" in conflict.lost
    if name == "by columns first":
        check(PAIRS[name], x, x, inputs=[even_split(2, 0, 8)] * 2, rtol=1e-3, atol=1e-3)


def scores(order, over):
    """Something of every query and key, summed over either."""
    return lambda x: jnp.tanh(x @ x.T if order else (2 * x @ x.T).T).sum(over)


def computed(order, over):
    """Differences of all pairs of what is computed from rows, and not of the rows themselves."""

    def fn(x):
        v = jnp.sin(x[:, 0])
        d = v[:, None] - v[None] if order else jnp.subtract.outer(v, v).T
        return (d * jnp.exp(-d * d)).sum(over)

    return fn


def test_either_row_of_a_pair_may_be_split_whatever_it_is_computed_from():
    """One row of each pair is gathered, whichever is first and whichever is summed over."""
    x, cases = random_array((512, 3)), itertools.product([computed, scores], [False, True], [0, 1])
    for made, order, over in cases:
        fn = made(order, over)
        lowered = gshard.jit(lambda x, fn=fn: fn(gshard.split(x, 0, 8)), devices=8).lower(x)
        assert kinds(lowered) == {"all_gather": 1}, (made, order, over)
        assert sent(lowered) == 64 * (1 if made is computed else 3) * 4 * 7
        (conflict,) = lowered.conflicts
        assert conflict.cost < conflict.instead
        assert conflict.kept != conflict.lost
    check(computed(True, 0), x, inputs=[even_split(2, 0, 8)], rtol=1e-3, atol=1e-3)


def test_a_product_of_three_is_weighed_whichever_operand_is_first():
    """Both indices of the matrix between them are split: one of two partial products is summed."""
    one, other = (jax.ShapeDtypeStruct((32, n), np.float32) for n in (64, 256))
    w = jax.ShapeDtypeStruct((64, 256), np.float32)

    def fn(spec, *operands):
        split = [gshard.split(x, 1, 8) for x in operands[:2]]
        return jnp.einsum(spec, *split, operands[2])

    found = [
        gshard.jit(lambda *a, s=spec: fn(s, *a), devices=8).lower(*arguments, w)
        for spec, *arguments in (("bi,bj,ij->b", one, other), ("bj,bi,ij->b", other, one))
    ]
    # The smaller partial product, and the sum of 32 numbers.
    assert [sent(lowered) for lowered in found] == [32 * 64 * 4 * 7 // 8 + 2 * 32 * 4 * 7 // 8] * 2


def test_choices_that_spread_to_the_same_tensors_are_tried_once():
    """Experts along one axis of a mesh, tokens along both: routing is by token, and stays so.

    To begin with experts, or with the tokens of one axis, comes to the same.
    """
    mesh = np.arange(8).reshape(2, 4)
    E, M, F, G, S, C = 16, 64, 128, 8, 64, 16

    def loss(weights, x_GSM):
        route_ME, up_EMF, down_EFM = weights
        gates_GSK, best_GSK = jax.lax.top_k(jax.nn.softmax(x_GSM @ route_ME), 2)
        mine_GSKE = jax.nn.one_hot(best_GSK, E)
        place_GSKE = jnp.cumsum(mine_GSKE.reshape(G, 2 * S, E), 1).reshape(mine_GSKE.shape) - 1
        slot_GSKC = jax.nn.one_hot((place_GSKE * mine_GSKE).sum(-1).astype(int), C)
        sent_GSEC = jnp.einsum("GSKE,GSKC->GSEC", mine_GSKE * (place_GSKE < C), slot_GSKC)
        back_GSEC = jnp.einsum("GSKE,GSKC,GSK->GSEC", mine_GSKE, slot_GSKC, gates_GSK)
        by_expert = mesh.T.reshape(4, 2, 1, 1)
        x_EGCM = gshard.shard(jnp.einsum("GSEC,GSM->EGCM", sent_GSEC, x_GSM), by_expert)
        h_EGCF = jax.nn.relu(jnp.einsum("EGCM,EMF->EGCF", x_EGCM, up_EMF))
        y_EGCM = gshard.shard(jnp.einsum("EGCF,EFM->EGCM", h_EGCF, down_EFM), by_expert)
        return (jnp.einsum("GSEC,EGCM->GSM", back_GSEC, y_EGCM) ** 2).mean()

    def step(weights, x_GSM):
        route_ME, *experts = weights
        split = [gshard.shard(w, mesh[:1].reshape(4, 1, 1)) for w in experts]
        return jax.grad(loss)([gshard.replicate(route_ME), *split], gshard.split(x_GSM, 0, 8))

    shapes = [(M, E), (E, M, F), (E, F, M)]
    weights = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    low = gshard.jit(step, devices=8).lower(weights, jax.ShapeDtypeStruct((G, S, M), np.float32))
    exchanged = 3 * (E * G // 8 * C * M * 4) * 3 // 4
    summed = 4 * (2 * E * M * F) // 4 + 2 * 4 * M * E * 7 // 8
    assert sum(c.total_bytes for c in low.collectives) == exchanged + summed
