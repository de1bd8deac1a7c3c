"""Propagation: who takes whose split over, and in which order of preference."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard.tensors.sharding import Split, compatible, fitting_part
from tests.oracle import check, kinds, random_array, sent

MESH = np.arange(8).reshape(2, 4)


def shardings(fn, *args):
    lowered = gshard.jit(fn).lower(*args)
    return [str(s) for s in jax.tree.leaves(lowered.in_shardings)], [
        str(s) for s in jax.tree.leaves(lowered.out_shardings)
    ]


def test_forwards_and_backwards_through_pointwise_operators():
    def fn(x, y):
        z = jnp.tanh(x + y)
        return gshard.split(z, 0, 8) * 2, z

    ins, outs = shardings(fn, random_array((8, 3)), random_array((8, 3)))
    assert ins == outs == ["split dim 0 by 8"] * 2


def test_through_transposes_broadcasts_and_reshapes():
    def fn(x):
        x = gshard.split(x, 1, 8)
        return x.T.reshape(4, 4, 3)[None] + jnp.zeros((2, 1, 1, 1))

    _, outs = shardings(fn, random_array((3, 16)))
    assert outs == ["split dim 1 by 4, 2 copies"] or outs == ["split dim 1 by 4 x dim 2 by 2"]


def test_annotations_are_never_overridden():
    def fn(x):
        x = gshard.replicate(x)
        return gshard.split(x + 1, 0, 8)

    ins, outs = shardings(fn, random_array((8,)))
    assert ins == ["replicated"]
    assert outs == ["split dim 0 by 8"]


def test_batch_dims_of_contractions_come_first():
    """Both could be split along the result's rows too; the batch dim needs no communication."""

    def fn(x, y):
        return jnp.einsum("bij,bjk->bik", gshard.split(x, 0, 8), y)

    ins, outs = shardings(fn, random_array((8, 8, 8)), random_array((8, 8, 8)))
    assert ins == ["split dim 0 by 8"] * 2
    assert outs == ["split dim 0 by 8"]


def test_two_splits_meet_in_one_result():
    def fn(x, w):
        return gshard.shard(x, MESH[:, :1]) @ gshard.shard(w, MESH[:1])

    _, outs = shardings(fn, random_array((8, 4)), random_array((4, 8)))
    assert outs == ["split dim 0 by 2 x dim 1 by 4"]


def test_the_larger_tensor_keeps_its_split():
    """Rows of the large operand stay where they are; the small one moves."""

    def fn(large, small):
        return gshard.split(large, 0, 8) + gshard.split(small, 1, 8)[:1]

    lowered = gshard.jit(fn).lower(random_array((64, 16)), random_array((8, 16)))
    assert str(lowered.out_shardings) == "split dim 0 by 8"


def test_gradients_need_no_annotations():
    """Tensor parallelism: the weights' gradients are split like the weights."""

    def loss(w1, w2, x):
        w1, w2 = gshard.split(w1, 1, 8), gshard.split(w2, 0, 8)
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w1) @ w2))

    args = [random_array((16, 64)), random_array((64, 16)), random_array((32, 16))]
    lowered = gshard.jit(jax.grad(loss, argnums=(0, 1))).lower(*args)
    assert [str(s) for s in lowered.out_shardings] == ["split dim 1 by 8", "split dim 0 by 8"]
    assert kinds(lowered) == {"all_reduce": 1}
    assert sent(lowered) == 2 * 32 * 16 * 4 * 7 // 8


def test_a_loop_carries_one_sharding_found_inside():
    """The carry starts unannotated; the body splits it."""

    def fn(x, ws):
        def layer(x, w):
            return jnp.tanh(gshard.split(x, 0, 8) @ w), None

        return jax.lax.scan(layer, x, ws)[0]

    ins, outs = shardings(fn, random_array((16, 4)), random_array((3, 4, 4)))
    assert ins == ["split dim 0 by 8", "replicated"]
    assert outs == ["split dim 0 by 8"]
    lowered = gshard.jit(fn).lower(random_array((16, 4)), random_array((3, 4, 4)))
    assert lowered.collectives == []


def test_deterministic():
    def fn(x, y):
        return jnp.einsum("ij,jk->ik", gshard.split(x, 0, 4), gshard.split(y, 1, 8)).sum(0)

    args = random_array((8, 8)), random_array((8, 8))
    texts = {gshard.jit(lambda x, y: fn(x, y)).lower(*args).as_text() for _ in range(3)}
    assert len({t.replace(" ", "") for t in texts}) == 1


@given(st.permutations(range(8)), st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8]))
def test_the_finest_part_of_a_split_that_fits(order, own, other):
    """Of a split in 8 tiles, beside one that has some of the devices' axes."""
    split = Split.of(np.arange(8) // (8 // own))
    beside = Split.of(np.array(order) // (8 // other))
    assert split
    part = fitting_part((beside,), split)
    fits = [k for k in (8, 4, 2) if k <= own and compatible((beside, split.major(k)))]
    assert part is (split.major(fits[0]) if fits else None)


def test_tokens_along_both_axes_of_a_mesh_meet_experts_along_one():
    """Groups of tokens keep the axis that experts do not have: two AllToAlls, and no gather."""

    def fn(x_GECM, *weights):
        x_GECM = gshard.split(x_GECM, 0, 8)
        wi_EMH, wo_EHM = (gshard.shard(w, MESH[:1].reshape(4, 1, 1)) for w in weights)
        h_GECH = jax.nn.relu(jnp.einsum("GECM,EMH->GECH", x_GECM, wi_EMH))
        return gshard.split(jnp.einsum("GECH,EHM->GECM", h_GECH, wo_EHM), 0, 8)

    args = [random_array(s) / 16 for s in [(16, 8, 2, 64), (8, 64, 512), (8, 512, 64)]]
    low = check(fn, *args, rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_to_all": 2}
    assert sent(low) == 2 * (2 * 8 * 2 * 64 * 4) * 3 // 4


def test_a_constant_of_a_loop_is_gathered_for_it_within_the_memory_limit_only():
    def fn(w, x):
        w = gshard.split(w, 0, 8)
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)[0]

    args = random_array((64, 64)), random_array((12, 16, 64))
    assert kinds(gshard.jit(fn).lower(*args)) == {"all_gather": 1}
    lean = gshard.jit(fn, memory_limit=1024).lower(*args)
    assert kinds(lean) == {"reduce_scatter": 12}


def test_of_equally_many_tensors_those_with_more_bytes_decide():
    """The mask has a byte for each element, and moves to the numbers."""
    order = np.arange(8).reshape(2, 4).T.reshape(-1)

    def fn(mask, x):
        return jnp.where(gshard.split(mask, 0, 8), gshard.shard(x, order), 0.0)

    low = gshard.jit(fn).lower(random_array((64,), bool), random_array((64,)))
    assert (kinds(low), sent(low)) == ({"collective_permute": 1}, 8)


def test_a_batch_dim_is_split_before_a_larger_operand_decides():
    """Either way as many bytes are sent: the operand that moves is exchanged, none is gathered."""

    def fn(x, y):
        return jnp.einsum("bij,bjk->bik", gshard.split(x, 0, 8), gshard.split(y, 2, 8))

    low = gshard.jit(fn).lower(random_array((8, 8, 8)), random_array((8, 8, 64)))
    assert kinds(low) == {"all_to_all": 1}
    assert str(low.out_shardings) == "split dim 0 by 8"
