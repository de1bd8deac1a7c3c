"""Tables as dataclasses: what a value may be follows from the types of the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from gshard.errors import UserError
from gshard.mt.typed import built, checked, is_a


@dataclass(frozen=True)
class Inner:
    word: Literal["one", "two"]
    most: Annotated[int | None, (1, 9)] = None


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    pair: tuple[float, float] = (0.0, 1.0)
    table: dict[str, Any] | None = None


def test_lists_and_tables_become_tuples_and_dataclasses():
    given = {"inner": [{"word": "one", "most": 3}, {"word": "two"}], "pair": [1, 2.5]}
    assert built(Outer, given) == Outer((Inner("one", 3), Inner("two")), (1, 2.5))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "here: 'inner' is missing"),
        ({"inner": [{}]}, "here: 'inner.word' is missing"),
        ({"inner": [{"word": "on"}]}, "inner.word is 'on', which is not one or two; did you mean"),
        (
            {"inner": [{"word": "two", "most": 10}]},
            "inner.most is 10; it must be at least 1 and at",
        ),
        ({"inner": [], "outer": 1}, "here: no setting 'outer'"),
        ({"inner": [], "pair": [1.0]}, "pair is .*, which is not a list of 2, each a number"),
        ({"inner": [], "pair": [True, 1]}, "pair is True, which is not a number"),
        ({"inner": [], "table": 5}, "table is 5, which is not a table or none"),
    ],
)
def test_what_is_wrong_is_named(given, said):
    with pytest.raises(UserError, match=said):
        built(Outer, given, "here: ")


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [(1, float, True), (True, int, False), (1.0, int, False), ((), tuple[str, ...], True)],
)
def test_whole_numbers_are_numbers_and_truths_are_not(value, kind, fits):
    assert is_a(value, kind) == fits
    if not fits:
        with pytest.raises(UserError, match="x is"):
            checked({"x": kind}, {"x": value})
