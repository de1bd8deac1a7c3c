"""Linear algebra: batch dims at every rank for free, matrix dims gathered with a reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.scipy import linalg

from tests.oracle import check, check_grad, even_split, random_array, sent


def spd(shape):
    """Symmetric positive definite matrices."""
    x = random_array(shape)
    return x @ np.swapaxes(x, -1, -2) + 4 * np.eye(shape[-1], dtype=np.float32)


def tridiagonal(a):
    d = jnp.diagonal(a, axis1=-2, axis2=-1)
    return lax.linalg.tridiagonal_solve(d * 0.1, d, d * 0.1, a)


OPS = {
    "cholesky": jnp.linalg.cholesky,
    "eig": jnp.linalg.eigvals,
    "eigh": lambda a: jnp.linalg.eigh(a)[0],
    "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "qr": jnp.linalg.qr,
    "lu": lax.linalg.lu,
    "schur": lax.linalg.schur,
    "hessenberg": lax.linalg.hessenberg,
    "triangular_solve": lambda a: lax.linalg.triangular_solve(jnp.tril(a), a, left_side=True),
    "tridiagonal": lax.linalg.tridiagonal,
    "tridiagonal_solve": tridiagonal,
    "solve": lambda a: jnp.linalg.solve(a, a[..., 0:1] + 1),
    "det": jnp.linalg.det,
    "inv": jnp.linalg.inv,
    "pinv": jnp.linalg.pinv,
    "symmetric_product": lambda a: lax.linalg.symmetric_product(a, a, symmetrize_output=True),
}
REORDERS = {"inv", "solve", "pinv", "det", "symmetric_product", "qr"}  # they use products, or more


@pytest.mark.parametrize("name", OPS)
def test_batch_dims_are_free(name):
    a = spd((3, 5, 4, 4))
    for dims, split in (
        (2, np.arange(2).reshape(1, 2, 1, 1)),
        (6, np.arange(6).reshape(3, 2, 1, 1)),
    ):
        low = check(OPS[name], a, devices=dims, inputs=[split], rtol=1e-4, atol=1e-4)
        assert sent(low) == 0, low.collectives


@pytest.mark.parametrize("name", ["cholesky", "eigh", "lu", "qr", "triangular_solve"])
def test_matrix_dims_are_gathered_and_say_so(name):
    a = spd((2, 7, 7))
    low = check(OPS[name], a, devices=3, inputs=[even_split(3, 1, 3)], rtol=1e-4, atol=1e-4)
    assert any("gather" in c.reason for c in low.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cholesky", "eigh", "solve", "inv"])
def test_gradients(name):
    a = spd((5, 3, 3))
    low = check_grad(OPS[name], a, devices=3, inputs=[even_split(3, 0, 3)], rtol=1e-3, atol=1e-3)
    # The weights of the test's own loss are made flat and reshaped.
    assert all("reshape" in c.reason for c in low.collectives)


def test_garbage_in_the_padding_neither_fails_nor_hangs():
    """5 matrices on 8 devices: three devices work on nothing but padding."""
    a = spd((5, 3, 3))

    def fn(a):
        return [OPS[n](a) for n in ("eig", "eigh", "svd", "schur", "hessenberg", "cholesky")]

    low = check(fn, a, inputs=[even_split(3, 0, 8)], rtol=1e-4, atol=1e-4)
    assert sent(low) == 0


def test_solvers_of_scipy():
    a, b = spd((5, 3, 3)), random_array((5, 3))

    def fn(a, b):
        factor = jax.vmap(linalg.cho_factor)(a)[0]
        return jax.vmap(lambda c, y: linalg.cho_solve((c, False), y))(factor, b)

    check(fn, a, b, devices=3, inputs=[even_split(3, 0, 3), even_split(2, 0, 3)], rtol=1e-3)


def test_custom_linear_solve_by_conjugate_gradients():
    a, b = spd((8, 8)), random_array((8,))

    def fn(a, b):
        return jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, tol=1e-6)[0]

    check(fn, a, b, devices=4, inputs=[even_split(2, 0, 4)], rtol=1e-2, atol=1e-3)


# ---------------------------------------------------------------- columns of a right-hand side


def from_the_right(a, b):
    return lax.linalg.triangular_solve(jnp.triu(a), b, left_side=False, lower=False)


def tridiagonal_system(a, b):
    d = jnp.diagonal(a, axis1=-2, axis2=-1)
    return lax.linalg.tridiagonal_solve(d * 0.1, d, d * 0.1, b)


def by_householder(a, b):
    reflectors, taus = lax.linalg.geqrf(a)
    return lax.linalg.ormqr(reflectors, taus, b)


SOLVERS = {
    "triangular": lambda a, b: linalg.solve_triangular(jnp.tril(a), b, lower=True),
    "triangular, transposed": lambda a, b: linalg.solve_triangular(jnp.tril(a), b, trans=1),
    "from the right": lambda a, b: jnp.swapaxes(from_the_right(a, jnp.swapaxes(b, -1, -2)), -1, -2),
    "solve": jnp.linalg.solve,
    "cho_solve": lambda a, b: linalg.cho_solve(linalg.cho_factor(a, lower=True), b),
    "lu_solve": lambda a, b: linalg.lu_solve(linalg.lu_factor(a), b),
    "tridiagonal": tridiagonal_system,
    "ormqr": by_householder,
}


@settings(max_examples=6)
@given(
    name=st.sampled_from(sorted(SOLVERS)),
    size=st.integers(1, 5),
    columns=st.integers(1, 13),
    devices=st.sampled_from([2, 3, 8]),
    dtype=st.sampled_from([jnp.float32, jnp.complex64]),
)
def test_columns_of_a_right_hand_side_are_free(name, size, columns, devices, dtype):
    a, b = spd((size, size)).astype(dtype), random_array((size, columns), dtype)
    inputs = [None, even_split(2, 1, devices)]
    low = check(SOLVERS[name], a, b, devices=devices, inputs=inputs, rtol=1e-3, atol=1e-3)
    assert sent(low) == 0, low.collectives


@pytest.mark.parametrize("name", ["solve", "cho_solve", "triangular"])
def test_systems_with_one_matrix_under_vmap(name):
    """`vmap` over right-hand sides alone makes them the columns of one system."""

    def fn(a, b):
        return jax.vmap(SOLVERS[name], (None, 0))(a, b)

    low = check(fn, spd((4, 4)), random_array((16, 4)), inputs=[None, even_split(2, 0, 8)])
    assert sent(low) == 0, low.collectives


def test_the_gradient_of_a_system_sums_over_columns_once():
    low = check_grad(
        SOLVERS["cho_solve"],
        spd((4, 4)),
        random_array((4, 16)),
        argnums=(0, 1),
        inputs=[None, even_split(2, 1, 8)],
        outputs=[even_split(2, 1, 8)],
        rtol=1e-3,
        atol=1e-3,
    )
    assert {c.kind for c in low.collectives} <= {"all_reduce"}
    assert sent(low, "all_reduce") <= 4 * 2 * 7 / 8 * 4 * 4 * 4


def test_columns_on_a_mesh_with_a_batch_of_matrices():
    """Matrices along one dim of the mesh, columns along the other."""
    tiles = np.arange(6).reshape(2, 1, 3)
    low = check(
        SOLVERS["triangular"], spd((4, 3, 3)), random_array((4, 3, 7)), devices=6,
        inputs=[np.arange(6).reshape(2, 3)[:, :1].reshape(2, 1, 1), tiles],
    )  # fmt: skip
    assert sent(low) == 0, low.collectives
