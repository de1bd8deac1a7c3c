"""Windows of tensors with more rows than what these are made of are computed by themselves."""

import jax
import jax.numpy as jnp

import gshard
from tests.oracle import annotated, check, even_split, kinds, random_array, sent


def limited(u):
    q = jnp.pad(u, ((2, 2), (0, 0)), mode="edge")
    d = q[1:] - q[:-1]
    slope = jnp.where(d[1:] * d[:-1] > 0, jnp.minimum(jnp.abs(d[1:]), jnp.abs(d[:-1])), 0)
    flux = q[1:-2] + 0.5 * slope[:-1]
    return u - 0.1 * (flux[1:] - flux[:-1])


def test_a_limiter_sends_the_rows_at_borders():
    """Also where tiles have padding: 61 rows are in tiles of 8."""
    rows = [even_split(2, 0, 8)]
    low = check(limited, random_array((61, 3)), inputs=rows, outputs=rows, rtol=1e-5, atol=1e-5)
    assert set(kinds(low)) == {"collective_permute"}
    assert sent(low) <= 4 * 12, low.collectives


def test_what_is_read_otherwise_stays(tmp_path):
    """The sum of all rows needs the tensor itself."""

    def fn(u):
        d = jnp.tanh(jnp.pad(u, ((2, 2), (0, 0))))
        return d[1:-3], d.sum()

    struct = jax.ShapeDtypeStruct((64, 3), jnp.float32)
    low = gshard.jit(annotated(fn, [even_split(2, 0, 8)]), devices=8).lower(struct)
    (text,) = (p.read_text() for p in low.dump(tmp_path) if "cut_windows" in p.name)
    assert "# not applied: no windows of larger tensors are read" in text
