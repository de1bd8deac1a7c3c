"""Arguments and results of a call that are not arrays.

`jax.jit` takes only arrays. Models often contain more: an activation function in a module, a name,
None. Such leaves of the arguments are static: they are part of the cache key. Leaves of the results
that are not arrays are returned unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from gshard import _jax
from gshard._jax import closed_over, is_array_like, is_ref


@dataclass(frozen=True, repr=False)
class Static:
    """A value that is not an array, compared and hashed as itself."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(eq=False)
class _ResultLeaf:
    """A leaf of the results that is not an array: a part of their tree."""

    value: Any


jax.tree_util.register_pytree_node(
    _ResultLeaf, lambda r: ((), Static(r.value)), lambda static, _: static.value
)


def with_static_results(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` with results that are not arrays moved into the tree structure, unhashed."""

    @functools.wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf if is_array_like(leaf) else _ResultLeaf(leaf), fun(*args, **kwargs)
        )

    return traced


@dataclass(frozen=True)
class StaticLeaves:
    """The tree of a call's arguments, and its leaves that are not arrays (None: an array)."""

    tree: Any
    marks: tuple[Static | None, ...]

    @staticmethod
    def of(
        args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[int], names: Sequence[str]
    ) -> Any:
        """The static leaves and the arrays of a call with static `numbers` and `names`."""
        count = len(args)
        static = {n % count if n < 0 else n for n in numbers} if count else set()
        given = (
            [Static(a) if i in static else a for i, a in enumerate(args)],
            {k: Static(v) if k in names else v for k, v in kwargs.items()},
        )
        leaves, tree = jax.tree.flatten(given)
        marks = tuple(
            None if is_array_like(x) else x if isinstance(x, Static) else Static(x) for x in leaves
        )
        for mark in filter(None, marks):
            _check_hash(mark)
        arrays = [x for x, mark in zip(leaves, marks, strict=True) if mark is None]
        return StaticLeaves(tree, marks), arrays

    def arguments(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The user's arguments again, with these arrays in them."""
        fresh = iter(arrays)
        leaves = [next(fresh) if mark is None else mark for mark in self.marks]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        bare = functools.partial(jax.tree.map, lambda x: x.value if isinstance(x, Static) else x)
        return [bare(a) for a in args], {k: bare(v) for k, v in kwargs.items()}

    def flat(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` as a function of only the arrays."""

        @functools.wraps(fun, updated=())
        def on_arrays(*arrays: Any) -> Any:
            args, kwargs = self.arguments(arrays)
            return fun(*args, **kwargs)

        del on_arrays.__wrapped__  # it has another signature
        return on_arrays

    def numbers_of(self, chosen: Callable[[int | str], bool]) -> tuple[int, ...]:
        """The indices of the arrays in arguments for which `chosen(number or name)` is true."""
        arrays = [i for i, mark in enumerate(self.marks) if mark is None]
        number = {leaf: i for i, leaf in enumerate(arrays)}
        args, kwargs = jax.tree.unflatten(self.tree, range(len(self.marks)))
        found = [
            number[leaf]
            for key, argument in [*enumerate(args), *kwargs.items()]
            if chosen(key)
            for leaf in jax.tree.leaves(argument)
            if leaf in number
        ]
        return tuple(sorted(found))


def on_values(fun: Callable[..., Any], refs: Sequence[int]) -> Callable[..., Any]:
    """`fun` of flat arguments, with the values of the references `refs` in their place.

    It returns their final values beside the results.
    """

    @functools.wraps(fun, updated=())
    def called(*values: Any) -> tuple[Any, list[Any]]:
        inside = {i: jax.new_ref(values[i]) for i in refs}
        results = fun(*(inside.get(i, x) for i, x in enumerate(values)))
        return results, [ref[...] for ref in inside.values()]

    return called


def check_given_once(refs: Sequence[Any]) -> None:
    """Reject a reference that is passed twice, as `jax.jit` does."""
    if len(set(map(id, refs))) < len(refs):
        raise ValueError(
            "one reference is passed as two arguments, or is an argument that the function also "
            "closes over, so writing to one would change the other; pass it once"
        )


def refs_of(traced: jax.stages.Traced) -> list[Any]:
    """The references that a traced function closes over."""
    return [c for c in (*closed_over(traced), *traced.jaxpr.consts) if is_ref(c)]


def on_refs(traced: jax.stages.Traced) -> Callable[..., Any]:
    """A traced function with its closed-over references as arguments, and its flat arguments."""
    count, jaxpr, out_tree = len(refs_of(traced)), traced.jaxpr, traced.out_tree
    in_front = closed_over(traced)

    def called(*values: Any) -> Any:
        refs, arguments = iter(values[:count]), values[count:]
        front = [next(refs) if is_ref(c) else c for c in in_front]
        consts = [next(refs) if is_ref(c) else c for c in jaxpr.consts]
        results = jaxpr_as_fun(ClosedJaxpr(jaxpr.jaxpr, consts))(*front, *arguments)
        return jax.tree.unflatten(out_tree, results)

    called.__name__ = called.__qualname__ = traced.fun_name
    return called


_called: contextvars.ContextVar[tuple[Any, ...] | None] = contextvars.ContextVar(
    "gshard_called", default=None
)


@contextlib.contextmanager
def called_with(fun: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
    """A context in which `names_of` names arrays as in this call, the outermost one.

    Wrappers, a library's or gshard's, unpack the user's arguments: the arrays stay the same.
    """
    token = _called.set(_called.get() or (fun, args, kwargs))
    try:
        yield
    finally:
        _called.reset(token)


def names_of(leaves: Sequence[Any]) -> tuple[str, ...]:
    """The paths of arrays in the arguments of `called_with`, "" for others; () outside of it."""
    if (call := _called.get()) is None:
        return ()
    found = {id(leaf): name for name, leaf in reversed([*named_leaves(*call)])}
    return tuple(found.get(id(leaf), "") for leaf in leaves)


def names_in_order(count: int) -> list[str]:
    """The paths of the `count` arrays in the arguments of `called_with`; "" where it has others."""
    call = _called.get()
    leaves = [] if call is None else list(named_leaves(*call))
    arrays = [(name, leaf) for name, leaf in leaves if hasattr(leaf, "shape")]
    for found in (leaves, arrays):  # a wrapper may have taken the static leaves out
        if len(found) == count:
            return [name for name, _ in found]
    return [""] * count


def named_leaves(fun: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of arguments with their paths, as in `model.blocks[3].mlp.up.weight`."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a function that Python cannot look into
        parameters = []
    positional = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    more = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "")
    first = len(positional) if more else 0
    positional += [f"{more}[{number - first}]" for number in range(len(positional), len(args))]
    for path, leaf in jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))[0]:
        side, key, *rest = path
        given = key.key if side.idx else positional[key.idx]
        yield given + jax.tree_util.keystr(tuple(rest)).removesuffix(".value"), leaf  # of NNX


@dataclass(frozen=True)
class Trees:
    """The trees of a call: its arguments, with their static leaves, and its results."""

    args_info: Any  # JAX's: the type of each argument, and whether it is donated
    out_tree: Any
    out_info: Any
    static: StaticLeaves | None

    @staticmethod
    def of(traced: jax.stages.Traced, static: StaticLeaves | None) -> Trees:
        """The trees of a traced function, and of the leaves that it did not see."""
        return Trees(traced.args_info, traced.out_tree, traced.out_info, static)

    @functools.cached_property
    def _infos(self) -> list[Any]:
        return jax.tree.leaves(self.args_info)

    @property
    def dtypes(self) -> list[Any]:
        """The types of the flat arguments."""
        return [info.dtype for info in self._infos]

    @property
    def types(self) -> list[tuple[Any, ...]]:
        """The shapes and types of the flat arguments."""
        return [(tuple(info.shape), info.dtype) for info in self._infos]

    @property
    def donated(self) -> tuple[int, ...]:
        """The indices of the donated flat arguments."""
        return tuple(i for i, info in enumerate(self._infos) if info.donated)

    @property
    def in_tree(self) -> Any:
        """The tree of the arrays among the arguments."""
        return jax.tree.structure(self.args_info)

    def like_arguments(self, values: Sequence[Any]) -> Any:
        """A tree like the arguments, with these leaves; keyword arguments come second, if any."""
        if self.static is not None:
            args, kwargs = self.static.arguments(values)
        else:
            args, kwargs = jax.tree.unflatten(self.in_tree, values)
        return (tuple(args), kwargs) if kwargs else tuple(args)

    def like_results(self, values: Sequence[Any]) -> Any:
        """A tree like the results, with these leaves."""
        return jax.tree.unflatten(self.out_tree, values)


def _check_hash(mark: Static) -> None:
    try:
        hash(mark)
    except TypeError:
        raise ValueError(
            f"an argument that is not an array, {mark!r} of type {type(mark.value).__name__}, "
            "is not hashable, so gshard.jit could not detect changes; pass its arrays, or "
            "a hashable value (a tuple instead of a list)"
        ) from None


def structs(known: Any, arguments: Any) -> Any:
    """The arguments' types, which keep no array alive; static ones as they are."""
    static, count = (*known.static_argnums, *known.static_argnames), len(arguments)
    if isinstance(arguments, dict):
        of = functools.partial(jax.tree.map, _jax.struct_of)
        return {k: v if k in static else of(v) for k, v in arguments.items()}
    fixed = {n % count if n < 0 else n for n in static if isinstance(n, int)} if count else ()
    return tuple(
        a if i in fixed else jax.tree.map(_jax.struct_of, a) for i, a in enumerate(arguments)
    )


def symbolic(leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """The first shape among the arguments with a size that is not known, as `jax.export` has."""
    shapes = (getattr(leaf, "shape", ()) for leaf in leaves)
    return next((s for s in shapes if not all(isinstance(n, int) for n in s)), None)


F = TypeVar("F", bound=Callable[..., Any])


def advising(method: F) -> F:
    """`method`, whose errors name the Equinox modules in the call that have Python numbers."""

    @functools.wraps(method)
    def advised(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            note, notes = _of_equinox((args, kwargs)), getattr(error, "__notes__", ())
            if note and note not in notes:
                error.add_note(note)
            raise

    return cast(F, advised)


def _of_equinox(arguments: Any) -> str | None:
    if (equinox := sys.modules.get("equinox")) is None:
        return None
    modules = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, equinox.Module))
    for module in modules:
        if isinstance(module, equinox.Module):
            for path, leaf in jax.tree_util.tree_leaves_with_path(module):
                if isinstance(leaf, bool | int | float | complex):
                    name = type(module).__name__ + jax.tree_util.keystr(path)
                    return (
                        f"{name} is the Python {type(leaf).__name__} {leaf!r}, which gshard.jit "
                        "traces, as jax.jit does: use gshard.contrib.equinox.filter_jit, which "
                        "keeps it static, as equinox.filter_jit does"
                    )
    return None


def watched(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with a warning when it changes an NNX module in place and does not return it."""

    @functools.wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if (nnx := sys.modules.get("flax.nnx")) is None:
            return fun(*args, **kwargs)
        variables = _nnx_variables(nnx, (args, kwargs))
        before = [variable.get_raw_value() for variable in variables.values()]
        results = fun(*args, **kwargs)
        returned = jax.tree.leaves(results)
        lost = [
            name
            for (name, variable), value in zip(variables.items(), before, strict=True)
            for now in [variable.get_raw_value()]
            if now is not value and not any(now is leaf for leaf in returned)
        ]
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            warnings.warn(
                f"{getattr(fun, '__name__', 'the function')} changes {', '.join(lost[:3])}{more} "
                "in place, which gshard.jit forgets, as jax.jit does: use gshard.contrib.nnx.jit, "
                "which keeps it, as flax.nnx.jit does, or return the module",
                stacklevel=1,
            )
        return results

    return traced


def _nnx_variables(nnx: Any, arguments: Any) -> dict[str, Any]:
    """The variables of the NNX modules, optimizers and the like among the arguments, by name."""
    found: dict[str, Any] = {}
    for module in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Pytree)):
        if isinstance(module, nnx.Pytree):
            for path, variable in nnx.iter_graph(module):
                if isinstance(variable, nnx.Variable):
                    name = ".".join((type(module).__name__, *map(str, path)))
                    found[name if name not in found else f"{name} ({len(found)})"] = variable
    return found
