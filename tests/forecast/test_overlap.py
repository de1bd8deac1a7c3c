"""The forecast of communication beside other work: what hides what, and for how long."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard.forecast.time import overlapped

M, ROWS = 2048, 131_072


def gathered_beside_product(x, w, v):
    """The gather of `v` waits for nothing, and the first product does not need it."""
    h = gshard.split(x, 0, 8) @ w
    return jnp.tanh(h) @ gshard.split(v, 0, 8)  # gathered


def chained(x, w):
    """A product needs all that is sent, and it is sent after everything else."""
    return gshard.split(gshard.split(x, 0, 8), 1, 8) @ gshard.replicate(w)


def lower(fn, *shapes, **how):
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    return gshard.jit(fn, devices=8, **how).lower(*args)


def test_a_gather_beside_a_product():
    low = lower(gathered_beside_product, (ROWS, M), (M, M), (M, M), hardware="h100")
    (gather,) = low.collectives
    assert gather.kind == "all_gather"
    (line,) = gather.overlapped_with
    text, first = inspect.getsourcelines(gathered_beside_product)
    assert text[int(line.rpartition(":")[2]) - first].endswith("@ w\n")
    assert "  during " in str(gather)
    found = low.forecast()
    assert found.exposed_seconds == 0 < found.hidden_seconds
    assert found.step_seconds == pytest.approx(found.serial_seconds - found.hidden_seconds)
    assert " hidden, " in str(found)
    assert "us of it hidden" in str(low.explain(seconds=0))
    assert found.as_dict()["hidden_seconds"] == found.hidden_seconds


def test_nothing_hides_what_a_product_needs():
    low = lower(chained, (ROWS, M), (M, M), hardware="h100")
    assert {c.overlapped_with for c in low.collectives} == {()}
    found = low.forecast()
    assert found.hidden_seconds < 0.01 * found.exposed_seconds


def test_only_where_the_compiler_overlaps():
    low = lower(gathered_beside_product, (ROWS, M), (M, M), (M, M), hardware="tpu-v3")
    assert {c.overlapped_with for c in low.collectives} == {()}
    found = low.forecast()
    assert found.hidden_seconds == 0
    assert found.step_seconds == found.serial_seconds


def test_a_product_hides_no_more_than_it_takes():
    """A small product and a large tensor: most stays exposed."""

    def fn(x, w, v):
        return jnp.sum(gshard.split(x, 0, 8) @ w), gshard.replicate(gshard.split(v, 0, 8))

    low = lower(fn, (64, 64), (64, 64), (ROWS, 8 * M), hardware="h100")
    found = low.forecast()
    products = [t for t in found.operators if "dot_general" in t.name]
    assert found.hidden_seconds <= sum(t.seconds for t in products)
    assert found.exposed_seconds > found.hidden_seconds


STEPS = [
    ("gather", ("w",), ("weights",)),
    ("hidden", ("x",), ("h",)),
    ("exchange", ("h",), ("tokens",)),
    ("experts", ("tokens", "weights"), ("y",)),
    ("other", ("x",), ("z",)),
]


def test_a_schedule():
    """The gather is sent during `hidden`; `other` passes `experts`, which waits for tokens."""
    sends, works = {"gather": 2.0, "exchange": 3.0}, {"hidden": 4.0, "experts": 5.0, "other": 1.0}
    found = overlapped(STEPS, sends, works, works.keys())
    assert found["gather"].exposed == 0
    assert found["gather"].overlapped == ("hidden",)
    assert found["exchange"].exposed == 2.0
    assert found["exchange"].overlapped == ("other",)


def test_transfers_queue_for_the_links():
    sends, works = {"gather": 9.0, "exchange": 3.0}, {"hidden": 4.0, "experts": 5.0, "other": 1.0}
    found = overlapped(STEPS, sends, works, {"hidden", "experts"})
    assert found["gather"].exposed == 4.0
    assert found["gather"].overlapped == ("hidden",)
    assert found["exchange"].exposed == 3.0
    assert found["exchange"].overlapped == ()


@given(st.data())
def test_no_schedule_is_faster_than_its_resources(data):
    """What is computed, and what is sent, take their time; and never longer than both together."""
    steps, sends, works, needed = [], {}, {}, {}
    for number in range(data.draw(st.integers(1, 12))):
        reads = data.draw(st.sets(st.integers(0, max(number - 1, 0)), max_size=3))
        steps.append((number, sorted(reads - {number}), (number,)))
        needed[number] = {number}.union(*(needed[other] for other in reads - {number}))
        kind = sends if data.draw(st.booleans()) else works
        kind[number] = float(data.draw(st.integers(1, 9)))
    found = overlapped(steps, sends, works, works.keys())
    assert found.keys() == sends.keys()
    for number, sent in found.items():
        assert 0 <= sent.exposed <= sends[number]
        for other in sent.overlapped:
            assert number not in needed[other]
            assert other not in needed[number]
    exposed = sum(sent.exposed for sent in found.values())
    assert sum(works.values()) + exposed >= max(sum(works.values()), sum(sends.values()))
    if not works:
        assert exposed == sum(sends.values())


def test_products_read_windows_where_they_are():
    """The weights of one expert are a contiguous slice, and columns of a matrix are none."""

    def rows(x, w):
        return x @ w[1]

    def columns(x, w):
        return x @ w[0][:, :M]

    for fn, copied in ((rows, 0), (columns, 1)):
        low = lower(fn, (ROWS, M), (4, M, 2 * M), hardware="h100")
        names = [t.name.split()[0] for t in low.forecast().operators]
        assert names == ["slice", "dot_general"][1 - copied :]
