"""Solvers over a split batch: what moves is one flag for each loop, does any member go on?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries.programs import check_program, data

# Their warnings are theirs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def problem(y, target):
    """A function with one root for each target."""
    return jnp.tanh(y) + 2 * y - target


@pytest.mark.parametrize("solver", ["Tsit5", "Kvaerno3"])
def test_diffrax(solver):
    diffrax = pytest.importorskip("diffrax")

    def solve(y0):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -5 * y + jnp.sin(t)),
            getattr(diffrax, solver)(),
            t0=0.0,
            t1=2.0,
            dt0=0.1,
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
            saveat=diffrax.SaveAt(ts=jnp.linspace(0, 2, 5)),
        ).ys

    assert check_program(jax.vmap(solve), data(16, 4), split={0: 0}) == []


def test_diffrax_backwards():
    """Through checkpointed loops."""
    diffrax = pytest.importorskip("diffrax")

    def loss(y0):
        term = diffrax.ODETerm(lambda t, y, args: -y)
        solution = diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.25, y0, max_steps=8)
        return jnp.sum(solution.ys**2)

    assert check_program(jax.grad(loss), data(16, 4), split={0: 0}) == []


@pytest.mark.parametrize("solver", ["Newton", "LevenbergMarquardt", "BFGS"])
def test_optimistix(solver):
    optimistix = pytest.importorskip("optimistix")
    method = getattr(optimistix, solver)(1e-5, 1e-5)

    def solve(target):
        start = jnp.zeros_like(target)
        if solver == "Newton":
            return optimistix.root_find(problem, method, start, target).value
        if solver == "BFGS":
            total = lambda y, target: jnp.sum(problem(y, target) ** 2)  # noqa: E731
            return optimistix.minimise(total, method, start, target).value
        return optimistix.least_squares(problem, method, start, target).value

    # A few rows would be gathered: cheaper than to ask all devices in every round for the end.
    assert check_program(jax.vmap(solve), data(256, 3), split={0: 0}, tolerance=1e-3) == []


def matrices(count: int) -> np.ndarray:
    return data(count, 5, 5) + 6 * np.eye(5, dtype=np.float32)


def test_lineax():
    lineax = pytest.importorskip("lineax")
    solvers = [lineax.LU(), lineax.QR(), lineax.AutoLinearSolver(well_posed=True)]
    solvers.append(lineax.GMRES(1e-5, 1e-5))

    def solve(matrix, b):
        operator = lineax.MatrixLinearOperator(matrix)
        return [lineax.linear_solve(operator, b, s, throw=False).value for s in solvers]

    args = matrices(13), data(13, 5)
    assert check_program(jax.vmap(solve), *args, split={0: 0, 1: 0}, tolerance=1e-3) == []


def test_jaxopt():
    jaxopt = pytest.importorskip("jaxopt")

    def fit(x, y):
        loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)  # noqa: E731
        solver = jaxopt.GradientDescent(fun=loss, maxiter=20)
        return solver.run(jnp.zeros(x.shape[1]), x, y).params

    def members(targets):
        total = lambda y, target: jnp.sum(problem(y, target) ** 2)  # noqa: E731
        solver = jaxopt.LBFGS(fun=total, maxiter=10)
        return jax.vmap(lambda t: solver.run(jnp.zeros_like(t), t).params)(targets)

    x = data(16, 3)
    assert check_program(fit, x, x.sum(1), split={0: 0, 1: 0}, tolerance=1e-3) == []
    assert check_program(members, x, split={0: 0}, tolerance=1e-3) == []
