"""The work of Pallas kernels: what their program does on every block, or what their author says."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import gshard
from gshard.forecast.work import kernel_work

M, K, N, ROWS = 64, 32, 16, 8


def product(x, w, *, rounds=1, cost=None):
    """Rows of `x` times `w`, so many times over, and their exponentials."""

    def kernel(x_ref, w_ref, o_ref):
        def body(_, total):
            return total + x_ref[...] @ w_ref[...]

        total = jax.lax.fori_loop(0, rounds, body, jnp.zeros((ROWS, N), jnp.float32))
        o_ref[...] = jnp.exp(total)

    return pl.pallas_call(
        kernel,
        grid=(M // ROWS,),
        in_specs=[
            pl.BlockSpec((ROWS, K), lambda i: (i, 0)),
            pl.BlockSpec((K, N), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((ROWS, N), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
        cost_estimate=cost,
        interpret=True,
    )(x, w)


def lowered(devices=1, **how):
    def fn(x, w):
        return product(gshard.split(x, 0, devices), w, **how)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, K), (K, N))]
    return gshard.jit(fn, devices=devices).lower(*shapes)


def work(low):
    (eqn,) = (e for e in low.jaxpr.eqns if e.primitive.name == "pallas_call")
    return kernel_work(eqn)


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("devices", [1, 4])
def test_products_are_counted_on_every_block(rounds, devices):
    found = work(lowered(devices, rounds=rounds))
    assert found.products == rounds * 2 * M * K * N / devices
    assert found.dtype == jnp.float32
    assert found.vector == (rounds + 1) * M * N / devices  # additions, and the exponentials
    assert found.bytes == 4 * ((M * K + M * N) / devices + K * N)


def test_what_the_author_says_goes_first_and_each_device_has_its_share():
    cost = pl.CostEstimate(flops=800, transcendentals=80, bytes_accessed=8000)
    assert work(lowered(1, cost=cost))[::2] == (800, 80)
    found = work(lowered(4, cost=cost))
    assert (found.products, found.vector, found.bytes) == (200, 20, 2000)


def test_a_kernel_takes_as_long_as_its_products():
    (timed,) = lowered(1, rounds=1000).forecast("h200").operators
    machine = gshard.forecast.hardware("h200")
    rate = machine.rate("float32") * machine.efficiency.products
    assert timed.arithmetic_seconds == pytest.approx(1000 * 2 * M * K * N / rate)
    assert timed.bound == "arithmetic"


def test_a_result_in_the_place_of_an_operand_takes_no_memory():
    def doubled(x, aliases):
        def kernel(x_ref, o_ref):
            o_ref[...] = 2.0 * x_ref[...]

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, shape, input_output_aliases=aliases, interpret=True)(x)

    def temporary(aliases):
        def fn(x):
            return jnp.sum(doubled(jnp.cumsum(x), aliases))

        x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
        return gshard.jit(fn, devices=1).lower(x).forecast("h200").memory.temporary

    assert temporary({}) == pytest.approx(2 * temporary({0: 0}), rel=0.01)
