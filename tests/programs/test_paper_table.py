"""The paper's operator table (section 5.3) on 8 devices: each row's collectives, exactly."""

import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent

A, B, C = 64, 48, 32


def row(dim: int) -> np.ndarray:
    return even_split(2, dim, 8)


WHOLE = np.zeros((1, 1), int)

ROWS = {
    "add A',A'->A'": (jnp.add, [(A,), (A,)], [even_split(1, 0, 8)] * 2, [even_split(1, 0, 8)], {}),
    "matmul AB',B'C->AC": (
        jnp.matmul,
        [(A, B), (B, C)],
        [row(1), row(0)],
        [WHOLE],
        {"all_reduce": 1},
    ),
    "matmul A'B,BC->A'C": (jnp.matmul, [(A, B), (B, C)], [row(0), WHOLE], [row(0)], {}),
    "matmul A'B,B'C->A'C": (
        jnp.matmul,
        [(A, B), (B, C)],
        [row(0), row(0)],
        [row(0)],
        {"all_gather": 1},
    ),
    "matmul A'B,BC'->AC'": (
        jnp.matmul,
        [(A, B), (B, C)],
        [row(0), row(1)],
        [row(1)],
        {"all_gather": 1},
    ),
    "reduce A'B->A'": (lambda x: x.sum(1), [(A, B)], [row(0)], [even_split(1, 0, 8)], {}),
    "reduce A'B->B": (
        lambda x: x.sum(0),
        [(A, B)],
        [row(0)],
        [np.zeros(1, int)],
        {"all_reduce": 1},
    ),
    "einsum G'SEC,G'SM->E'GCM": (
        lambda mask, x: jnp.einsum("GSEC,GSM->EGCM", mask, x),
        [(8, 16, 8, 4), (8, 16, 32)],
        [even_split(4, 0, 8), even_split(3, 0, 8)],
        [even_split(4, 0, 8)],
        {"all_to_all": 1},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    fn, shapes, inputs, outputs, expected = ROWS[name]
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]
    lowered = check(fn, *args, inputs=inputs, outputs=outputs, atol=1e-4)
    assert kinds(lowered) == expected


@pytest.mark.parametrize(
    ("name", "moving"), [("matmul A'B,B'C->A'C", (B, C)), ("matmul A'B,BC'->AC'", (A, B))]
)
@pytest.mark.parametrize("uneven", [0, 3])
def test_a_gather_beyond_the_memory_limit_becomes_a_loop_of_permutes(name, moving, uneven):
    fn, shapes, inputs, outputs, _ = ROWS[name]
    x, y = (random_array((a + uneven, b + uneven)) for a, b in shapes)

    def annotated(x, y):
        x, y = gshard.shard(x, inputs[0]), gshard.shard(y, inputs[1])
        return gshard.shard(fn(x, y), outputs[0])

    step = gshard.jit(annotated, memory_limit=1024)
    np.testing.assert_allclose(step(x, y), x @ y, rtol=1e-4, atol=1e-4)
    lowered = step.lower(x, y)
    (permute,) = lowered.collectives
    assert permute.kind == "collective_permute"
    assert permute.count == 7
    tile = -(-(moving[0] + uneven) // 8) * (moving[1] + uneven) * 4
    assert permute.bytes == tile
    assert "memory limit" in permute.reason
    assert sent(lowered) == sent(gshard.jit(annotated).lower(x, y))


def test_partial_sums_of_a_split_result_are_scattered():
    lowered = check(
        jnp.matmul,
        random_array((A, B)),
        random_array((B, C)),
        inputs=[row(1), row(0)],
        outputs=[row(0)],
        atol=1e-4,
    )
    assert kinds(lowered) == {"reduce_scatter": 1}
    assert sent(lowered) == A * C * 4 * 7 // 8
