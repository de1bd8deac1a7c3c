"""`gshard.jit`: `jax.jit` with gshard's partitioner; `pipeline` lists the stages of a lowering."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

import jax
from jax.sharding import Mesh

from gshard import _jax
from gshard.capture.calls import (
    StaticLeaves,
    Trees,
    advising,
    called_with,
    check_given_once,
    names_of,
    on_refs,
    on_values,
    refs_of,
    structs,
    symbolic,
    watched,
    with_static_results,
)
from gshard.capture.flatten import mesh_in
from gshard.capture.placement import DeviceOrder, device_order, layouts, mesh_of, with_shardings
from gshard.capture.stage import USUAL
from gshard.checking.smaller import with_sizes
from gshard.forecast.hardware import Hardware, accelerator
from gshard.forecast.hardware import hardware as hardware_of
from gshard.reproducible import REPRODUCIBLE
from gshard.runtime.options import (
    MEMORY_LIMIT,
    JitKeywords,
    Keywords,
    Options,
    check_partitioner,
    checked_devices,
    of_layout,
)
from gshard.runtime.pipeline import collecting_new_objects_alone, lower
from gshard.runtime.stages import Lowered
from gshard.runtime.xla import lower_with_xla
from gshard.tensors.annotate import constraining, is_tracing_for_gshard, tracing_for
from gshard.tensors.sharding import Sharding
from gshard.tensors.uneven import UnevenArray

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


@overload
def jit(fun: Callable[P, R], /, **keywords: Unpack[JitKeywords]) -> Jitted[P, R]: ...


@overload
def jit(
    fun: None = None, /, **keywords: Unpack[JitKeywords]
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


@_jax.api_boundary
def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: jax.Device | None = None,
    backend: str | None = None,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    devices: Sequence[jax.Device] | int | None = None,
    partitioner: str = "gshard",
    memory_limit: int = MEMORY_LIMIT,
    strict: bool = False,
    hardware: str | Path | Hardware | None = None,
    annotations: Any = None,
    reproducible: bool = False,
) -> Any:
    """Like `jax.jit`, for a function whose tensors are annotated with `split` and the like.

    `devices` are the devices to run on, or a number of abstract devices, for which `lower` works
    without hardware. By default they are those of the mesh that is set, else those of the largest
    mesh of arguments and keywords, else all; an argument on one device, with a mesh or without,
    does not determine them. `partitioner="xla"` keeps the annotations and leaves the partitioning
    to XLA. An operand that would take more than `memory_limit` bytes when gathered is passed around
    the devices in a loop instead. `strict=True` rejects primitives without a rule, which would
    otherwise run on replicated operands. `hardware` is what costs are computed for
    (`gshard.forecast.known()` lists names): by default what JAX reports the devices to be. CPUs
    then count as generic accelerators; `hardware="cpu"` plans for the CPU. If `devices` are
    abstract, a model that has kernels for some platforms is traced for that of `hardware`.

    `in_shardings` and `out_shardings` are trees of `NamedSharding`, `PartitionSpec`, `Format` or
    `gshard.Sharding`, or prefixes of such trees; None leaves the choice to gshard. `annotations` is
    a `gshard.Layout`, whose annotations are applied to arguments, results and tensors inside, on as
    many devices as it is for. `reproducible` results have the same bits on any devices
    (docs/howto/reproducible.md).
    """
    check_partitioner(partitioner, reproducible)
    named = None if hardware is None else hardware_of(hardware)
    inside, count = of_layout(annotations)
    variant = REPRODUCIBLE if reproducible else USUAL
    how = (partitioner, memory_limit, strict, named, inside, variant, count)
    options = Options(checked_devices(devices, device), backend, *how)
    static = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    donated = {"donate_argnums": donate_argnums, "donate_argnames": donate_argnames}
    xla = {"keep_unused": keep_unused, "inline": inline, "compiler_options": compiler_options}
    keywords = Keywords({**static, **donated, **xla}, in_shardings, out_shardings)

    def jitted(fun: Callable[..., Any]) -> Any:
        return Jitted(keywords, options, annotations.annotated(fun) if count else fun)

    return jitted if fun is None else jitted(fun)  # used as a decorator with keywords, or without


class Jitted(Generic[P, R]):
    """A function to be partitioned: call it, or `lower` it to see what that would do."""

    __wrapped__: Callable[P, R]  # by functools.update_wrapper

    def __init__(self, keywords: Keywords, options: Options, fun: Callable[P, R]):
        functools.update_wrapper(self, fun)
        self.options = options
        self._keywords = keywords
        shardings = keywords.in_shardings, keywords.out_shardings
        static = _jax.jit_info(jax.jit(fun, **keywords.of_jax)).static_argnums
        self._fun = with_shardings(watched(fun), *shardings, static)
        # JAX itself checks the keywords, flattens the arguments and traces, as it does for jax.jit.
        self._traces = jax.jit(with_static_results(self._fun), **keywords.of_jax)
        self._known = _jax.jit_info(self._traces)
        self._with_leaves: dict[Any, Jitted[..., Any]] = {}
        self._own = weakref.WeakKeyDictionary[Lowered, Lowered]()
        self._closed_over: dict[Any, list[Any]] = {}  # references, by the same keys
        self._quick = _jax.quick_call(
            fun, self._cache_miss, self._known, (options, keywords.key(self._known))
        )

    @_jax.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Partition for these arguments if that has not been done yet, and run."""
        return self._quick(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<gshard.jit of {_jax.fun_name(self._fun)}>"

    def __reduce__(self) -> Any:
        return Jitted, (self._keywords, self.options, self.__wrapped__)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...

    @overload
    def __get__(
        self: Jitted[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method."""
        return self if instance is None else functools.partial(self, instance)

    @_jax.api_boundary
    @advising
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Partition for arguments like these: arrays, or `jax.ShapeDtypeStruct`s."""
        _, leaves = _jax.parse_arguments(self._known, args, kwargs)
        if any(map(_jax.is_ref, leaves)):
            of_values, values, _ = self._without_refs(args, kwargs)
            return of_values.lower(*values)
        if not all(map(_jax.is_array_like, leaves)):
            static, arrays = self.static_leaves(args, kwargs)
            with called_with(self._fun, args, kwargs):
                return self._for_leaves(static)._lower_arrays(tuple(arrays), {}, arrays, static)
        return self._lower_arrays(args, kwargs, leaves)

    @_jax.api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The partitioned program as JAX's own stage, on logical values: for `jax.export`.

        With symbolic dims, which JAX cannot run inside of manual regions, it is the program with
        sharding constraints instead, for XLA to partition when a size is known.
        """
        _, leaves = _jax.parse_arguments(self._known, args, kwargs)
        if symbolic(leaves) is None:
            return self.lower(*args, **kwargs).logical()
        inlined = jax.jit(lambda *args, **kwargs: self._inlined(args, kwargs, leaves))
        return inlined.trace(*args, **kwargs)

    @_jax.api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and types of the results."""
        return jax.eval_shape(self, *args, **kwargs)

    def clear_cache(self) -> None:
        """Drop the compiled programs of this function."""
        self._quick.clear_cache()  # type: ignore[attr-defined]  # as for `_cache_size`
        self._traces.clear_cache()
        self._with_leaves.clear()
        self._closed_over.clear()

    def _cache_size(self) -> int:
        """How many signatures it has a program for; functions of `jax.jit` have this method too."""
        others = sum(jitted._cache_size() for jitted in self._with_leaves.values())
        return self._quick._cache_size() + others  # type: ignore[attr-defined]  # JAX's C++ code

    # ------------------------------------------------------------ new signatures

    @advising
    def _cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Called by JAX for a signature that has no program yet.

        Returns the results, and the data with which later calls bypass Python.
        """
        _, leaves = _jax.parse_arguments(self._known, args, kwargs)
        if _jax.is_tracing() or any(map(_jax.is_tracer, leaves)):
            return self._inlined(args, kwargs, leaves), None, False
        if any(map(_jax.is_ref, leaves)):
            return self._on_refs(args, kwargs), None, False
        if not all(map(_jax.is_array_like, leaves)):
            static, arrays = self.static_leaves(args, kwargs)
            return self._for_leaves(static)(*arrays), None, False
        traced, order, mesh = self._trace(args, kwargs, leaves)
        if refs := refs_of(traced):
            return self._of_refs(traced)(*refs, *leaves), None, False
        lowered = self._lower(traced, order, mesh, leaves)
        try:
            results, quick = lowered.compile().run(leaves)
        except _jax.InternalFloatingPointError as error:  # debug_nans: find the operator
            with jax.disable_jit():
                self._fun(*args, **kwargs)
            raise FloatingPointError(f"{error} in the partitioned program alone") from None
        return lowered.trees.like_results(results), quick, False

    def _lower_arrays(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        static: StaticLeaves | None = None,
    ) -> Lowered:
        with collecting_new_objects_alone():
            traced, order, mesh = self._trace(args, kwargs, leaves)
            if refs := refs_of(traced):
                return self._of_refs(traced).lower(*refs, *leaves)
            lowered = self._lower(traced, order, mesh, leaves, static)
        if lowered not in self._own:  # a copy: what is kept must not keep the function
            given = structs(self._known, args), structs(self._known, kwargs)
            self._own[lowered] = copy.copy(lowered)
            self._own[lowered].resized = functools.partial(self._resized, *given)
        return self._own[lowered].named(names_of(leaves))

    def _resized(self, args: Any, kwargs: Any, sizes: dict[int, int], times: int) -> Any:
        """The program for arguments of sizes that are so many times smaller; traced for 0 times."""
        args, kwargs = with_sizes((args, kwargs), sizes)
        how = self._keywords, replace(self.options, shrunk=max(times, 1)), self.__wrapped__
        smaller: Jitted[..., Any] = Jitted(*how)
        if times:
            return smaller.lower(*args, **kwargs)
        return smaller._trace(args, kwargs, jax.tree.leaves((args, kwargs)))[0]

    def _trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> tuple[jax.stages.Traced, DeviceOrder, Mesh | None]:
        """The traced function, the devices, and the mesh of the arguments or in the program."""
        if (shape := symbolic(leaves)) is not None:
            raise ValueError(
                "gshard.jit plans tiles for known sizes, and an argument has the shape "
                f"({', '.join(map(str, shape))}): jax.export takes it"
            )
        mesh = mesh_of([*leaves, *self._keywords.shardings])
        order = self._order(mesh)
        self.options.check_count(order.count)
        with tracing_for(order, self.options.target(order.devices), self.options.hardware):
            traced = self._traces.trace(*structs(self._known, args), **structs(self._known, kwargs))
        return traced, order, mesh or mesh_in(traced.jaxpr)

    def _lower(
        self,
        traced: jax.stages.Traced,
        order: DeviceOrder,
        mesh: Mesh | None,
        leaves: Sequence[Any],
        static: StaticLeaves | None = None,
    ) -> Lowered:
        trees = Trees.of(traced, static)
        given_layouts = layouts(traced.jaxpr.jaxpr, leaves, order)
        settings = self._keywords.settings(trees.donated, *given_layouts)
        before = _lowered_before(traced.jaxpr, order, mesh, settings, self.options)
        given = [None] * len(_jax.closed_over(traced)) + [order.held(x) for x in leaves]
        for known, lowered in before:
            if known == given or lowered.fits(given):
                return lowered
        how = lower_with_xla if self.options.partitioner == "xla" else lower
        hardware = self.options.hardware or accelerator(order.first)
        options = replace(self.options, hardware=hardware)
        lowered = Lowered(how(traced, given, order, mesh, settings, options), trees, hardware)
        before.append((given, lowered))
        return lowered

    def _order(self, mesh: Mesh | None) -> DeviceOrder:
        """The devices, in the order in which they are numbered."""
        devices = self.options.devices
        if devices is None:
            here = jax.devices(self.options.backend)[: self.options.layout_devices]
            devices = tuple(here if mesh is None else mesh.devices.flat)
        return device_order(devices)

    def _inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> Any:
        """Called inside another trace: the annotated program, inlined.

        Under `gshard.jit` annotations stay annotations, which the outer function partitions by;
        otherwise they become sharding constraints for XLA.
        """
        call = self._traces if all(map(_jax.is_array_like, leaves)) else self._fun
        order = self._order(mesh_of(self._keywords.shardings))
        if is_tracing_for_gshard() or isinstance(order.devices, int) or order.count == 1:
            return call(*args, **kwargs)
        with constraining(order):
            return call(*args, **kwargs)

    # ------------------------------------------------------------ arguments that are not arrays

    def static_leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[StaticLeaves, list[Any]]:
        """The arguments of a call that are static, and the arrays, one by one."""
        known = self._known
        return StaticLeaves.of(args, kwargs, known.static_argnums, known.static_argnames)

    def _for_leaves(self, static: StaticLeaves) -> Jitted[..., Any]:
        """This function with these non-array leaves bound: a function of arrays only."""
        if static not in self._with_leaves:
            keywords = self._keywords.of_arrays(self._donated(static))
            self._with_leaves[static] = Jitted(keywords, self.options, static.flat(self._fun))
        return self._with_leaves[static]

    def _donated(self, static: StaticLeaves) -> tuple[int, ...]:
        """The indices of the donated arrays."""
        numbers, names = self._known.donate_argnums, self._known.donate_argnames
        return static.numbers_of(lambda key: key in numbers or key in names)

    # ------------------------------------------------------------ references

    def _on_refs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with references (`jax.new_ref`), whose values it updates."""
        of_values, values, refs = self._without_refs(args, kwargs)
        results, after = of_values(*values)
        for ref, value in zip(refs, after, strict=True):
            _jax.set_ref(ref, value.logical() if isinstance(value, UnevenArray) else value)
        return results

    def _without_refs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Jitted[..., Any], list[Any], list[Any]]:
        """A function of the references' values, its flat arguments, and the references.

        The values are donated to it, and it returns the new ones beside the results.
        """
        static, leaves = self.static_leaves(args, kwargs)
        refs = {i: x for i, x in enumerate(leaves) if _jax.is_ref(x)}
        values = [_jax.ref_value(x) if i in refs else x for i, x in enumerate(leaves)]
        key = (static, tuple(refs))
        if key not in self._with_leaves:
            keywords = self._keywords.of_arrays(tuple(sorted({*self._donated(static), *refs})))
            of_values = on_values(static.flat(self._fun), tuple(refs))
            self._with_leaves[key] = Jitted(keywords, self.options, of_values)
            traced, _, _ = self._with_leaves[key]._trace(tuple(values), {}, values)
            self._closed_over[key] = refs_of(traced)
        check_given_once([*refs.values(), *self._closed_over[key]])
        return self._with_leaves[key], values, list(refs.values())

    def _of_refs(self, traced: jax.stages.Traced) -> Jitted[..., Any]:
        """This function with its closed-over references as arguments, and its flat arguments."""
        if traced.jaxpr not in self._with_leaves:
            first = len(refs_of(traced))
            keywords = self._keywords.of_arrays(
                tuple(first + i for i in Trees.of(traced, None).donated)
            )
            self._with_leaves[traced.jaxpr] = Jitted(keywords, self.options, on_refs(traced))
        return self._with_leaves[traced.jaxpr]


@_jax.weakref_cache
def _lowered_before(jaxpr: Any, *key: Any) -> list[tuple[list[Sharding | None], Lowered]]:
    """Programs of a traced function, by the arguments' shardings; dropped with the function."""
    return []
