"""Einsum: every case of section 3.3.2, values and collectives."""

import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import (
    DEVICE_COUNTS,
    SIZES,
    assignments,
    check,
    check_grad,
    random_array,
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
