"""Arithmetic modulo 2**61 - 1, beside Python's integers and fractions."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gshard.checking.exact import field

P = int(field.P)
numbers = st.lists(st.integers(0, P - 1), min_size=1, max_size=9)


def array(values):
    return np.asarray(values, np.uint64)


@given(numbers, st.integers(0, P - 1))
def test_the_ring(values, other):
    a, b = array(values), array([other] * len(values))
    with np.errstate(over="ignore"):
        assert field.add(a, b).tolist() == [(x + other) % P for x in values]
        assert field.sub(a, b).tolist() == [(x - other) % P for x in values]
        assert field.mul(a, b).tolist() == [x * other % P for x in values]
        assert field.inverse(a).tolist() == [pow(x, P - 2, P) for x in values]
        assert field.total(a, (0,)) == sum(values) % P
        assert field.root_to(a).tolist() == [pow(37, x, P) for x in values]


def test_products_of_matrices():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, P, s, np.uint64) for s in ((2, 3, 4100), (2, 4100, 2)))
    a[0], b[0] = P - 1, P - 1  # the largest limbs there are
    wanted = np.einsum("dik,dkj->dij", a.astype(object), b.astype(object)) % P
    assert (field.matmul(a, b).astype(object) == wanted).all()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_floats_are_rationals(values):
    wanted = [Fraction(x).numerator * pow(Fraction(x).denominator, -1, P) % P for x in values]
    with np.errstate(all="ignore"):
        assert field.of_floats(np.asarray(values)).tolist() == wanted


def test_integers_of_all_types():
    for dtype in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, bool):
        values = np.asarray([0, 1, 1 if dtype is bool else np.iinfo(dtype).max], dtype)
        assert field.of_integers(values).tolist() == [int(x) % P for x in values.tolist()]
    assert field.of_integers(np.int8([-1, -128])).tolist() == [P - 1, P - 128]
