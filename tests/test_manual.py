"""Manual regions: the paper's Gather example, scan, grad, several regions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard import manual
from tests.oracle import check, kinds, random_array, run

D = 8


@pytest.fixture(params=["gshard", "xla"])
def jit(request):
    """`gshard.jit` with either partitioner."""
    return functools.partial(gshard.jit, partitioner=request.param)


def along(rank: int, dim: int, count: int = D) -> np.ndarray:
    shape = [1] * rank
    shape[dim] = count
    return np.arange(count).reshape(shape)


def paper_gather(inputs, s_indices):
    """Section 3.2, line by line: a Gather that stays within each partition."""
    inputs = gshard.split(inputs, 0, D)
    s_indices = gshard.split(s_indices, 1, D)
    partitioned_input = gshard.auto_to_manual_spmd_partition(inputs)
    partitioned_s_indices = gshard.auto_to_manual_spmd_partition(s_indices)
    groups = lax.broadcasted_iota(jnp.int32, partitioned_s_indices.shape, 1)
    partitioned_gs_indices = jnp.concatenate([groups, partitioned_s_indices], 3)
    data = partitioned_input[partitioned_gs_indices[..., 0], partitioned_gs_indices[..., 1]]
    return gshard.manual_to_auto_spmd_partition(data, along(4, 1))


def gather_case(G=16, S=5, M=3, E=4, C=2):
    indices = np.random.default_rng(0).integers(0, S, (E, G, C, 1)).astype(np.int32)
    return random_array((G, S, M)), indices


def test_the_papers_gather_moves_nothing():
    lowered = check(paper_gather, *gather_case(), exact=True)
    assert lowered.collectives == []


def test_its_gradient_moves_nothing_either():
    def loss(x, indices):
        return jnp.sum(jnp.sin(paper_gather(x, indices)))

    lowered = check(jax.grad(loss), *gather_case())
    assert lowered.collectives == []


def test_local_shapes_and_partition_id(jit):
    def fn(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, D))
        marked = part + 100 * gshard.partition_id()
        return gshard.manual_to_auto_spmd_partition(marked, along(1, 0))

    x = np.arange(16)
    got = run(jit(fn), x)
    np.testing.assert_array_equal(got, x + 100 * (x // 2))


def test_collectives_at_hand_and_their_gradients(jit):
    """A ring shift, a sum and a gather by hand, against the same on the whole tensor."""
    ring = [(i, (i + 1) % D) for i in range(D)]

    def by_hand(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, D))
        shifted = manual.collective_permute(part, ring)
        total = manual.all_reduce(jnp.sum(part * part))
        everyone = manual.all_gather(part[:1], 0)
        mixed = shifted * total + jnp.sum(everyone**3)
        return gshard.manual_to_auto_spmd_partition(mixed, along(1, 0))

    def whole(x):
        return jnp.roll(x, 2) * jnp.sum(x * x) + jnp.sum(x[::2] ** 3)

    x = random_array((16,))
    np.testing.assert_allclose(run(jit(by_hand), x), whole(x), rtol=1e-5)
    weights = np.cos(np.arange(16))
    got = gshard.jit(jax.grad(lambda x: jnp.sum(by_hand(x) * weights)))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(whole(x) * weights))(x), rtol=1e-4)


def test_a_replicated_value_in_and_out_differentiates(jit):
    """Every copy of w contributes to its gradient; only one copy of the loss counts."""

    def by_hand(x, w):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, D))
        own_w = gshard.auto_to_manual_spmd_partition(gshard.replicate(w))
        total = manual.all_reduce(jnp.sum(jnp.sin(part @ own_w)))
        return gshard.manual_to_auto_spmd_partition(total, np.array(0))

    def whole(x, w):
        return jnp.sum(jnp.sin(x @ w))

    x, w = random_array((16, 3)), random_array((3, 4), seed=1)
    lowered = gshard.jit(jax.grad(by_hand, argnums=(0, 1))).lower(x, w)
    assert "all_gather" not in kinds(lowered)
    got = run(jit(jax.grad(by_hand, argnums=(0, 1))), x, w)
    for a, b in zip(got, jax.grad(whole, argnums=(0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_several_regions_inside_scan(jit):
    def fn(x, ws):
        def layer(carry, w):
            part = gshard.auto_to_manual_spmd_partition(gshard.split(carry, 0, D))
            back = gshard.manual_to_auto_spmd_partition(part[::-1] * 2.0, along(2, 0))
            again = gshard.auto_to_manual_spmd_partition(gshard.split(back @ w, 1, 4))
            out = gshard.manual_to_auto_spmd_partition(again + 1.0, along(2, 1, 4))
            return out, jnp.sum(out)

        return lax.scan(layer, x, ws)

    def plain(x, ws):
        def layer(carry, w):
            pairs = carry.reshape(D, 2, -1)[:, ::-1].reshape(carry.shape)
            out = (pairs * 2.0) @ w + 1.0
            return out, jnp.sum(out)

        return lax.scan(layer, x, ws)

    x, ws = random_array((16, 8)), random_array((3, 8, 8), seed=1) / 4
    for transform in (
        lambda f: f,
        lambda f: jax.grad(lambda x, w: f(x, w)[1].sum(), argnums=(0, 1)),
    ):
        got, wanted = run(jit(transform(fn)), x, ws), transform(plain)(x, ws)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_manual_carry_through_a_loop(jit):
    def fn(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, D))
        part = lax.fori_loop(0, 3, lambda i, p: p + gshard.partition_id(), part)
        return gshard.manual_to_auto_spmd_partition(part, along(1, 0))

    x = np.arange(16)
    np.testing.assert_array_equal(run(jit(fn), x), x + 3 * (x // 2))


def test_uneven_parts_need_the_full_shape(jit):
    def fn(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, D))
        return gshard.manual_to_auto_spmd_partition(part * 2, along(1, 0), full_shape=(13,))

    x = random_array((13,))
    np.testing.assert_array_equal(run(jit(fn), x), x * 2)


def test_outside_of_gshard_jit_both_are_the_identity():
    inputs, indices = gather_case()
    np.testing.assert_array_equal(
        paper_gather(inputs, indices), jax.jit(paper_gather)(inputs, indices)
    )


def test_functions_jitted_inside_are_traced_for_the_devices_at_hand(jit):
    @jax.jit
    def number(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, len(x) // 2))
        return gshard.manual_to_auto_spmd_partition(
            part * 0 + gshard.partition_id(), along(1, 0, len(x) // 2)
        )

    x = np.arange(8)
    np.testing.assert_array_equal(number(x), x * 0)
    for devices in (4, 8, 4):
        got = run(jit(lambda x: number(x), devices=jax.devices()[:devices]), x)
        assert int(got[2]) == 1
    np.testing.assert_array_equal(number(x), x * 0)


def test_an_unannotated_tensor_is_refused():
    with pytest.raises(ValueError, match="no annotation"):
        gshard.jit(gshard.auto_to_manual_spmd_partition).lower(random_array((8,)))


def test_mixing_with_automatic_values_is_refused():
    def fn(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, D))
        return gshard.split(part, 0, 2)

    with pytest.raises(ValueError, match=r"test_manual\.py.*manual region"):
        gshard.jit(fn).lower(random_array((16,)))
