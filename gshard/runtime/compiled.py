"""`Compiled`: an executable program, and what it has in common with `Lowered`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Format

from gshard import _jax
from gshard.capture.calls import Trees
from gshard.capture.placement import other_layout
from gshard.graph.readable import counted
from gshard.runtime.ports import laid_out
from gshard.runtime.xla import Partitioned


class Stage:
    """The arguments and results of a program, as `jax.stages` describes them."""

    trees: Trees
    _program: Partitioned

    args_info = property(lambda self: self.trees.args_info)
    in_tree = property(lambda self: self.trees.in_tree)
    in_avals = property(lambda self: jax.tree.map(lambda info: info._aval, self.trees.args_info))
    donate_argnums = property(lambda self: self.trees.donated)
    out_info = property(lambda self: self.trees.out_info)
    out_tree = property(lambda self: self.trees.out_tree)

    def _name(self) -> str:
        devices = counted(self._program.num_devices, "device")
        return f"{self._program.name} for {devices}"

    def arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat arguments of a call, which have to have the types of the program's own."""
        leaves = jax.tree.leaves((args, kwargs))
        arrays = [x for x in leaves if _jax.is_array_like(x)]
        types = [_jax.shape_and_dtype(x) for x in arrays]
        if types != self.trees.types:
            raise TypeError(
                "the program was compiled for arrays of the types "
                f"{_named(self.trees.types)}, and was called with {_named(types)}"
            )
        return arrays


class Compiled(Stage):
    """An executable program: call it with arguments like those it was lowered for."""

    def __init__(
        self, program: Partitioned, trees: Trees, compiler_options: dict[str, Any] | None = None
    ):
        self._program = program
        self.trees = trees
        self._options = compiler_options
        self._stage = program.compile(compiler_options)
        self._layouts = [f.layout for f in _flat_formats(self._stage.input_formats)]
        consts = program.placed_consts()
        self._consts = [*map(laid_out, consts, self._layouts)]
        self._crossing = _jax.quick_call_of_compiled(self._cross)
        self._quick = _jax.quick_call_of_compiled(self._cache_miss)

    def __repr__(self) -> str:
        return f"<gshard.Compiled of {self._name()}>"

    @_jax.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if not self._program.wraps:
            return self._quick(*args, **kwargs)
        if self._program.wraps_arguments:
            args, kwargs = tuple(self._program.put(self.arrays(args, kwargs))), {}
        results = self._unwrapped(lambda: self._crossing(*args, **kwargs))
        return self.trees.like_results(results)

    def _cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        results, quick = self.run(self.arrays(args, kwargs))
        return self.trees.like_results(results), quick, False

    def run(self, leaves: Sequence[Any]) -> tuple[list[Any], Any]:
        """Place the flat arguments, execute, wrap the results; also returns JAX's fast-path data.

        The fast path passes arrays on unchanged. There is one only if nothing is wrapped, and it
        applies to the arguments' present shardings: for others, JAX calls this again.
        """
        placed = self._placed(leaves)
        inputs = [*self._consts, *placed]
        if self._program.wraps:
            return self._unwrapped(lambda: _jax.execute(self._stage, inputs)), None
        results = self._program.get(_jax.execute(self._stage, inputs))
        return results, self._quick_way(leaves, placed, self.trees.out_tree, results)

    def _unwrapped(self, outputs: Callable[[], Sequence[Any]]) -> list[Any]:
        """The results that the user sees of outputs, which may have padding.

        `jax.debug_nans` and `jax.debug_infs` check the results here: JAX would check the padding.
        """
        kinds = [kind for kind in ("nan", "inf") if getattr(jax.config, f"jax_debug_{kind}s")]
        if not kinds:
            return self._program.get(outputs())
        with jax.debug_nans(False), jax.debug_infs(False):
            results = self._program.get(outputs())
            values = [np.asarray(x) for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]
        for kind in kinds:
            if any(getattr(np, f"is{kind}")(value).any() for value in values):
                raise _jax.InternalFloatingPointError(self._program.name, kind)
        return results

    def _placed(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments as the executable's inputs."""
        return self._laid_out(self._program.put(leaves))

    def _laid_out(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Inputs in the memory layouts of the executable, which does not check them."""
        return [*map(laid_out, arrays, self._layouts[len(self._consts) :])]

    def _cross(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """The outputs before unwrapping, and the fast path to them."""
        crossing = self._program.wraps_arguments  # the arguments have been placed
        leaves = list(args) if crossing else self.arrays(args, kwargs)
        placed = self._laid_out(leaves) if crossing else self._placed(leaves)
        out = _jax.execute(self._stage, [*self._consts, *placed])
        return out, self._quick_way(leaves, placed, jax.tree.structure(out), out), False

    def _quick_way(
        self, leaves: Sequence[Any], placed: Sequence[Any], tree: Any, results: Sequence[Any]
    ) -> Any:
        """JAX's fast-path data for arguments like these; None if the fast path cannot be used.

        It cannot if an array had to be moved that is on several devices, or has another layout: the
        fast path would pass it to the executable without checking its sharding, or copy it to the
        devices as it is. JAX places all other arguments itself.
        """
        pairs = list(zip(leaves, placed, strict=True))
        if any(x is not a and not _is_moved(x, a) for x, a in pairs):
            return None
        names = [x.sharding if x is a else None for x, a in pairs]
        return _jax.quick_data(self._stage, tree, names, self._consts, results)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments under the program's shardings: a call with these moves nothing."""
        placed = self._placed(self.arrays(args, kwargs))
        return self.trees.like_arguments(self._program.shown(placed))

    @property
    def input_shardings(self) -> Any:
        """JAX's shardings of the arguments: positional ones, and a dict of the keyword ones."""
        structs = self._program.structs(self.trees.dtypes)
        return jax.tree.unflatten(self.trees.in_tree, [s.sharding for s in structs])

    @property
    def output_shardings(self) -> Any:
        """JAX's shardings of the results; one that does not divide is given as replicated."""
        return self.trees.like_results(self._program.named_results())

    @property
    def input_formats(self) -> Any:
        """JAX's formats of the arguments: shardings and memory layouts."""
        crossing = _flat_formats(self._stage.input_formats)[len(self._consts) :]
        structs = self._program.structs(self.trees.dtypes)
        formats = [_format(c, s.ndim, s.sharding) for c, s in zip(crossing, structs, strict=True)]
        return jax.tree.unflatten(self.trees.in_tree, formats)

    @property
    def output_formats(self) -> Any:
        """JAX's formats of the results."""
        crossing = _flat_formats(self._stage.output_formats)
        ranks = [info.ndim for info in jax.tree.leaves(self.trees.out_info)]
        formats = map(_format, crossing, ranks, self._program.named_results())
        return self.trees.like_results(list(formats))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, as `jax.stages.Compiled.call` does, which takes `_params` first."""
        first = 1 if args and args[0] is self._params else 0
        return self(*args[first:], **kwargs)

    def runtime_executable(self) -> Any:
        """The executable of XLA's runtime."""
        return self._stage.runtime_executable()

    def as_text(self) -> str | None:
        """XLA's optimised program."""
        return self._stage.as_text()

    def cost_analysis(self) -> Any:
        """XLA's own estimate of the work on one device."""
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any:
        """XLA's memory analysis for one device."""
        return self._stage.memory_analysis()

    # Read by `jax.experimental.serialize_executable`. Programs whose arguments or results are
    # wrapped, or that close over arrays, would lose their wrapping.
    @property
    def _executable(self) -> Any:
        if self._consts or self._program.wraps:
            raise ValueError(
                "a program that closes over arrays, or has arguments or results that do not "
                "divide by their tiles or are on devices in an irregular order, cannot be "
                "serialized: pass the arrays as arguments, and choose sizes that divide; "
                "jax.export serializes it without the compiled code"
            )
        if not _holds_its_code(self._stage):
            self._stage = _compiled_anew(self._program.traced, self._options)
        return self._stage._executable

    @property
    def _params(self) -> Any:
        return self._stage._params

    _no_kwargs = False


# How object files begin, on Linux and on macOS.
_OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe")


def _holds_its_code(stage: jax.stages.Compiled) -> bool:
    """Whether XLA serializes a program with its machine code.

    XLA's CPU backend keeps no object files of a program that it loaded, as JAX does from its
    compilation cache: serialized and loaded once more, the program ends its first call with
    "NOT_FOUND: Function ... not found".
    """
    executable = stage.runtime_executable()
    if executable is None or executable.client.platform != "cpu":
        return True
    serialized = executable.serialize()
    return any(start in serialized for start in _OBJECT_FILES)


def _compiled_anew(
    traced: jax.stages.Traced, options: dict[str, Any] | None
) -> jax.stages.Compiled:
    """The program, compiled although JAX's compilation cache has it.

    So does JAX's cache in memory, whose key has the options: one that changes no code is added.
    """
    options = {"xla_dump_max_hlo_modules": 0, **(options or {})}
    used = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting when it opens the cache
    try:
        return traced.lower().compile(compiler_options=options)
    finally:
        jax.config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()


def _is_moved(value: Any, placed: jax.Array) -> bool:
    """Whether JAX's fast path moves an argument to where it was placed, and into that layout."""
    if not isinstance(value, jax.Array):
        return True
    usual = other_layout(value) is None and other_layout(placed) is None
    return usual and value.sharding.num_devices == 1


def _flat_formats(tree: Any) -> list[Format]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Format))


def _format(crossing: Format, rank: int, sharding: Any) -> Format:
    """The format of an array that the user sees; a wrapped one has the default layout."""
    layout = crossing.layout
    as_it_is = layout is not None and len(layout.major_to_minor) == rank
    return Format(layout if as_it_is else None, sharding)


def _named(types: Sequence[tuple[Any, ...]]) -> str:
    return "(" + ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types) + ")"
