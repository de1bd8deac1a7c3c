"""A batch of Kalman filters fitted by gradient descent: the series are split, the model is shared.

`vmap` leaves the covariances, which do not depend on the data, without a batch dim. The innovations
of all series then are the columns of one triangular system, which stay split. The gradient of a
covariance is a sum over the series, and the backward loop is linear in it: gshard carries it
unreduced and sums once, after the loop. What is summed in every step is one number, which a
primitive without a rule for unreduced operands (a branch by platform) needs.
"""

import jax
import jax.numpy as jnp
import jax.scipy.linalg

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size


def log_likelihood(model, series_TK):
    """Of one series of observations."""
    move, see, noise, error = (model[name] for name in ("move", "see", "noise", "error"))
    states, seen = move.shape[0], see.shape[0]

    def observe(belief, y_K):
        mean, spread = belief
        mean, spread = move @ mean, move @ spread @ move.T + noise @ noise.T
        innovation = y_K - see @ mean
        root = jnp.linalg.cholesky(see @ spread @ see.T + error @ error.T)
        scaled = jax.scipy.linalg.solve_triangular(root, innovation, lower=True)
        seen_from = jax.scipy.linalg.solve_triangular(root, see @ spread, lower=True)
        mean, spread = mean + seen_from.T @ scaled, spread - seen_from.T @ seen_from
        return (mean, spread), -0.5 * scaled @ scaled - jnp.log(jnp.diag(root)).sum()

    start = jnp.zeros(states), jnp.eye(states)
    _, terms = jax.lax.scan(observe, start, series_TK)
    return terms.sum() - 0.5 * seen * len(series_TK) * jnp.log(2 * jnp.pi)


def loss(model, series_BTK):
    return -jax.vmap(log_likelihood, (None, 0))(model, series_BTK).mean()


def step(model, series_BTK):
    value, grads = jax.value_and_grad(loss)(model, gshard.split(series_BTK, 0, D))
    return jax.tree.map(lambda w, g: w - 1e-3 * g, model, grads), value


def smoothed(gain_TNN, mean_TN, spread_TNN):
    """A series smoothed by `lax.associative_scan`, backwards in time, its steps split."""

    @jax.vmap
    def combine(after, before):
        (gain, mean, spread), (own, more, noise) = after, before
        return own @ gain, own @ mean + more, own @ spread @ own.T + noise

    steps = tuple(gshard.split(x, 0, D) for x in (gain_TNN, mean_TN, spread_TNN))
    return jax.lax.associative_scan(combine, steps, reverse=True)[1:]


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, T, N, K = (1024, 32, 16, 8) if size.M < 1024 else (65536, 256, 64, 32)
    f32 = jnp.float32
    sizes = {"move": (N, N), "see": (K, N), "noise": (N, N), "error": (K, K)}
    model = {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in sizes.items()}
    # Each device has the gradient of its own series: as in any data parallel program.
    expert = all_reduce(nbytes(model)) + all_reduce(4)
    series = jax.ShapeDtypeStruct((B, T, K), f32)
    long = 8 * (T + 4)  # a row of every tile: of the gains, the means and the covariances
    gains, means = (jax.ShapeDtypeStruct((long, *own), f32) for own in ((N, N), (N,)))
    rows = all_gather(D * (2 * N * N + N) * 4)
    return [
        Recipe("batch of Kalman filters", step, (model, series), expert),
        Recipe("Kalman smoother in time", smoothed, (gains, means, gains), rows),
    ]


if __name__ == "__main__":
    show(recipes())
