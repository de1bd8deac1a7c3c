"""What is planned is what is sent, in benchmarks and random programs.

So it is in recipes, which `tests/programs/test_recipes.py` lowers.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

import gshard
from benchmarks.programs import programs
from tests.oracle import annotated, even_split, random_array
from tests.planning.as_planned import assert_planned_is_sent
from tests.programs.test_random_programs import program, random_programs


@pytest.mark.parametrize("case", programs(), ids=lambda case: case.name)
def test_benchmarks(case):
    assert_planned_is_sent(gshard.jit(case.fn).lower(*case.args))


@given(random_programs())
def test_random_programs(case):
    devices, shapes, inputs, steps = case

    def mark(x, assignment):
        return x if assignment is None else gshard.shard(x, assignment)

    fn = program(steps, inputs, mark)
    both = lambda *xs: (fn(*xs), jax.grad(lambda *a: fn(*a)[1])(*xs))  # noqa: E731
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    assert_planned_is_sent(gshard.jit(both, devices=devices).lower(*arguments))


KINDS = {
    "prod": (jnp.prod, jnp.int32),
    "max of complex": (jnp.max, jnp.complex64),
    "all": (jnp.all, jnp.bool_),
    "xor": (lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (0,)), jnp.int32),
    "max": (jnp.max, jnp.bfloat16),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("parts", [3, 5, 8])
def test_reductions_of_every_kind(name, parts):
    fn, dtype = KINDS[name]
    mark = annotated(fn, [even_split(1, 0, parts)])
    assert_planned_is_sent(gshard.jit(mark).lower(random_array((13,), dtype)))


def test_keys():
    def fn(keys):
        return gshard.replicate(gshard.split(keys, 0, 8))

    assert_planned_is_sent(gshard.jit(fn).lower(jax.random.split(jax.random.key(0), 16)))


def layer(x, w):
    x, w = gshard.split(x, 0, 8), gshard.split(w, 0, 8)
    return jnp.sin(x @ w) @ w.T


def test_a_plan_shows_what_moves_where_to_and_why():
    text = str(gshard.jit(layer).lower(jnp.ones((64, 32)), jnp.ones((32, 16))).plan)
    (line,) = [line for line in text.split("\n") if "reshard" in line]
    assert "reshard[split dim 0 by 8 -> replicated] " in line
    assert re.search(
        r"# \S*test_plan.py:\d+: operand of dot_general "
        r"\(rule: rules/contraction.py\); sends 1,792 bytes",
        line,
    )


def test_a_plan_names_the_rule_that_is_a_partial_function():
    text = str(gshard.jit(lambda x: gshard.split(x, 0, 8).sum(0)).lower(jnp.ones((16, 4))).plan)
    assert "reduce_sum (rule: rules/reduction.py); sends 28 bytes" in text


def test_a_dump_has_a_file_for_every_stage(tmp_path):
    """And a line that a stage changed is marked; the shift is one operator after its pass."""

    def fn(x):
        return gshard.split(jnp.concatenate([x[1:], x[:1]]), 0, 8)

    paths = gshard.jit(fn).lower(jnp.ones((16, 4))).dump(tmp_path)
    assert [path.stem for path in paths] == [
        "00-flatten",
        "01-mark_recursions",
        "02-fold_permutation_checks",
        "03-compose_row_maps",
        "04-transpose_products",
        "05-propagate",
        "06-undo_merges",
        "07-block_scans",
        "08-batch_alike",
        "09-unstack_rows",
        "10-compute_in_parts",
        "11-choose_row_spaces",
        "12-exchange_by_expert",
        "13-ring_attention",
        "14-plan",
        "15-share",
        "16-drop_unused",
        "17-expand",
        "18-combine",
        "19-emit",
    ]
    composed = paths[3].read_text()
    (line,) = [line for line in composed.split("\n") if "row_map[" in line]
    assert line.startswith(">")
    assert "# not applied: there is no ragged product" in paths[12].read_text()
    assert "halo[" in paths[14].read_text()
    assert "collective-permute[" in paths[17].read_text()
    assert "ppermute[" in paths[19].read_text()
