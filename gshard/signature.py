"""How a user's call becomes a flat list of arrays, and flat results the user's tree again.

Leaves that are not arrays (an activation function in a model, a string, None) are static: they
take part in the cache key, and come out as they went in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _is_array(leaf: Any) -> bool:
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(
        leaf, (bool, int, float, complex)
    )


class _Static:
    """A leaf that is not an array, hashed by value if it can be, else by identity."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self.hash = hash(value)
        except TypeError:
            self.hash = id(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:
            return False


class Signature:
    """A function and which of its arguments are static or donated."""

    def __init__(self, fn: Callable, static_argnums, donate_argnums):
        self.fn = fn
        self.static = _as_tuple(static_argnums)
        self.donate = _as_tuple(donate_argnums)

    def bind(self, args: tuple, kwargs: dict) -> Call:
        """One call, flattened."""
        static = {i % len(args) if i < 0 else i for i in self.static} if args else set()
        dynamic = [a for i, a in enumerate(args) if i not in static]
        fixed = tuple((i, _Static(args[i])) for i in sorted(static) if i < len(args))
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        marks = tuple(None if _is_array(leaf) else _Static(leaf) for leaf in leaves)
        arrays = [leaf for leaf, mark in zip(leaves, marks, strict=True) if mark is None]
        avals = tuple(_aval(a) for a in arrays)
        return Call(
            self, arrays, avals, tree, marks, fixed, len(args), self.donated(args, static, marks)
        )

    def donated(self, args: tuple, static: set[int], marks) -> tuple[int, ...]:
        """The numbers of the flat arrays that belong to donated arguments."""
        if not self.donate:
            return ()
        numbers, leaf, array = [], 0, 0
        for i, arg in enumerate(args):
            if i in static:
                continue
            for _ in jax.tree.leaves(arg):
                if marks[leaf] is None:
                    if i in self.donate:
                        numbers.append(array)
                    array += 1
                leaf += 1
        return tuple(numbers)

    def flat(self, call: Call) -> tuple[Callable, Results]:
        """The function on flat arrays, and where its results' tree will be found once traced."""
        results = Results()

        @functools.wraps(self.fn, updated=())  # so that JAX's errors name the user's function
        def flat_fn(*arrays):
            args, kwargs = call.arguments(arrays)
            return results.flatten(self.fn(*args, **kwargs))

        return flat_fn, results


@dataclass(frozen=True)
class Call:
    """The arguments of one call: arrays, and everything else, by which programs are cached."""

    signature: Signature
    leaves: list[Any]
    avals: tuple
    tree: Any
    marks: tuple
    fixed: tuple
    num_args: int
    donated: tuple[int, ...]

    @functools.cached_property
    def key(self) -> Any:
        """Calls with one key run one program."""
        types = tuple((a.shape, a.dtype, a.weak_type) for a in self.avals)
        return types, self.tree, self.marks, self.fixed

    def arguments(self, arrays: Sequence[Any]) -> tuple[list, dict]:
        """The user's arguments, with `arrays` for the arrays in them."""
        fresh = iter(arrays)
        leaves = [next(fresh) if m is None else m.value for m in self.marks]
        dynamic, kwargs = jax.tree.unflatten(self.tree, leaves)
        given = {i: s.value for i, s in self.fixed}
        rest = iter(dynamic)
        return [given[i] if i in given else next(rest) for i in range(self.num_args)], kwargs

    def unflatten_arguments(self, values: Sequence[Any]) -> Any:
        """A tree like the arguments, with other leaves; keyword arguments stand beside if any."""
        args, kwargs = self.arguments(values)
        return (tuple(args), kwargs) if kwargs else tuple(args)


@dataclass
class Results:
    """The tree of a function's results, known once it has been traced."""

    tree: Any = None
    marks: list[Any] = field(default_factory=list)

    def flatten(self, value: Any) -> list[Any]:
        """The arrays of a result; anything else in it is kept for `unflatten`."""
        leaves, self.tree = jax.tree.flatten(value)
        self.marks = [None if _is_array(leaf) else _Static(leaf) for leaf in leaves]
        return [leaf for leaf, mark in zip(leaves, self.marks, strict=True) if mark is None]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The user's result, with `arrays` for the arrays in it."""
        fresh = iter(arrays)
        return jax.tree.unflatten(
            self.tree, [next(fresh) if m is None else m.value for m in self.marks]
        )


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(x, "weak_type", False)) or isinstance(x, (bool, int, float, complex))
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    if isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(
        np.shape(x) if not hasattr(x, "shape") else tuple(x.shape), dtype, weak_type=weak
    )


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)
