"""Einsum: every case of section 3.3.2, values and collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from tests.oracle import (
    DEVICE_COUNTS,
    SIZES,
    assert_same,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    random_array,
    run,
    sent,
)

EINSUMS = [
    "ij,jk->ik",
    "bij,bjk->bik",
    "ij,ij->",
    "i,j->ij",
    "gsec,gsm->egcm",
    "abc,cb->a",
    "ij,kj->ki",
]


@st.composite
def contractions(draw):
    spec = draw(st.sampled_from(EINSUMS))
    names, result = spec.replace("->", ",").split(","), spec.split("->")[1]
    sizes = {c: draw(st.sampled_from((*SIZES[:6], 0))) for c in sorted(set(spec) - set(",->"))}
    shapes = [[sizes[c] for c in part] for part in names[:2]]
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    inputs = [draw(assignments(len(s), devices)) for s in shapes]
    outputs = [draw(assignments(len(result), devices))]
    return spec, shapes, devices, inputs, outputs


@given(contractions())
def test_any_split_of_any_einsum(case):
    spec, shapes, devices, inputs, outputs = case
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]

    def fn(x, y):
        return jnp.einsum(spec, x, y)

    check(fn, *args, devices=devices, inputs=inputs, outputs=outputs)
    check_grad(fn, *args, argnums=(0, 1), devices=devices, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(
    ("fn", "transposed"),
    [
        (lambda a, b: (a @ b).T, 0),
        (lambda a, b: jnp.matmul(a, b, precision=("highest", "default")).T, 0),
        (lambda a, b: jnp.einsum("xij,xjk->xki", a[None], b[None]), 0),
        (lambda a, b: jax.grad(lambda b: jnp.sum(jnp.tanh(a @ b)))(b), 0),
        (lambda a, b: ((y := a @ b).T, y), 1),  # y is needed, too
        (lambda a, b: jnp.einsum("ij,kl->ikjl", a, b), 1),  # not one operand's dims as a whole
    ],
)
def test_a_transposed_product_is_the_product_the_other_way_round(fn, transposed):
    """So that a gradient is made in the order in which it is scattered."""
    args = random_array((6, 8)), random_array((8, 4))
    low = check(fn, *args, inputs=[even_split(2, 0, 2)], devices=2)
    names = [e.primitive.name for e in low.jaxpr.eqns]
    assert (names.count("dot_general"), names.count("transpose")) == (
        1 + ("tanh" in names),
        transposed,
    )


def test_what_was_gathered_transposed_is_not_gathered_again():
    """A step of Newton and Schulz, as Muon takes it: x.T is used before x is."""
    rows = even_split(2, 0, 8)
    x = random_array((16, 64))

    def fn(x):
        return gshard.shard((x @ x.T) @ x, rows)

    low = check(fn, x, inputs=[rows], rtol=1e-4, atol=1e-3)
    assert kinds(low) == {"all_gather": 1}
    assert sent(low) == x.nbytes * 7 // 8


def test_the_padding_of_what_goes_round_a_ring_is_masked():
    """Rows that do not divide: the last tile of the visitor has garbage behind them."""
    a, b = random_array((16, 13)), random_array((13, 24))
    step = gshard.jit(
        lambda a, b: gshard.split(gshard.split(a, 0, 8) @ gshard.split(b, 0, 8), 0, 8),
        memory_limit=64,
    )
    assert_same(run(step, a, b), a @ b)
    assert kinds(step.lower(a, b)) == {"collective_permute": 7}


def test_the_matrices_of_a_grouped_product_on_some_devices_only():
    """Rows are not sent to the devices that have their group's matrix where some have none."""
    args = random_array((12, 8)), random_array((3, 8, 8), seed=1), np.array([3, 5, 4], np.int32)
    low = check(jax.lax.ragged_dot, *args, devices=4, inputs=[None, even_split(3, 0, 3)])
    assert set(kinds(low)) <= {"all_gather", "all_reduce", "collective_permute"}
    assert sent(low) > 0


@pytest.mark.parametrize("split", [even_split(3, 0, 4), even_split(3, 2, 3)])
def test_groups_of_every_batch_have_sizes_of_their_own(split):
    """`vmap` of a grouped product: sizes are split with their batch, and nothing is sent for it."""
    sizes = np.array([[2, 4], [1, 5], [6, 0], [3, 2]], np.int32)
    args = random_array((4, 6, 3)), random_array((4, 2, 3, 5), seed=1), sizes
    fn = jax.vmap(jax.lax.ragged_dot)
    low = check(fn, *args, inputs=[split], rtol=1e-4, atol=1e-4)
    assert not split.shape[2] > 1 or kinds(low) == {"all_reduce": 1}
    assert not split.shape[0] > 1 or kinds(low).keys() <= {"all_gather"}
    check_grad(fn, *args, argnums=(0, 1), inputs=[split], rtol=1e-4, atol=1e-4)
    assert gshard.check(lambda x, w, n: fn(gshard.shard(x, split), w, n), *args, devices=8).exact
