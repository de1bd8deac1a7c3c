"""Rows follow their experts: program in, program out, and in the dump where it applied or not."""

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from tests.capture.simplify.texts import dedent
from tests.propagation.rewrites.rewritten import rewritten

ARGUMENTS = (
    np.ones((16, 4), np.float32),
    np.ones((8, 4, 4), np.float32),
    np.zeros(16, np.int32),
    np.zeros(8, np.int32),
)


def experts(between, annotate=lambda w: gshard.split(w, 0, 8)):
    def fn(x, w, order, sizes):
        y = between(jax.lax.ragged_dot(x[order], annotate(w), sizes))
        return jnp.zeros_like(y).at[order].add(y)

    return fn


def exchange_by_expert(fn):
    return rewritten("exchange_by_expert", fn, *ARGUMENTS)


def test_rows_are_sent_to_their_experts_and_back():
    lines = exchange_by_expert(experts(jax.nn.relu))
    short = [line.split(" = ")[-1].split(" ragged_dot")[0].split("]")[0] for line in lines]
    assert "\n".join(short) == dedent("""
        # applied at test_exchange_by_expert.py: rows are on the devices of their groups
        take_rows[target=16 rows in 8 groups over 8 devices
        annotate[annotation=rows by group
        grouped_dot[groups=16 rows in 8 groups over 8 devices
        max x 0.0  # split dim 0 by 8 ragged
        put_rows[source=16 rows in 8 groups over 8 devices adds=True
        annotate[annotation=rows by group
    """)


def test_an_operator_that_mixes_rows_gets_them_back():
    lines = exchange_by_expert(experts(lambda y: y - y.mean(0)))
    why = "reduce_sum at test_exchange_by_expert.py, which is not row-wise"
    assert f"# rows are exchanged back for {why}" in lines


def test_experts_that_are_not_split():
    (line,) = exchange_by_expert(experts(jax.nn.relu, annotate=gshard.replicate))
    assert line == "# not applied at test_exchange_by_expert.py: its groups are not split"


def test_without_a_ragged_product():
    (line,) = exchange_by_expert(lambda x, w, order, sizes: gshard.split(x, 0, 8) @ w[0])
    assert line == "# not applied: there is no ragged product"
