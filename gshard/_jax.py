"""All that gshard uses of JAX's private modules, in the one file to adapt to a new release."""

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import mesh as _mesh
from jax._src import pjit as _pjit
from jax._src import source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src import tree_util as _tree_util
from jax._src import util as _util
from jax._src.ad_checkpoint import remat_p
from jax._src.api_util import InternalFloatingPointError
from jax._src.core import Primitive, Var
from jax._src.custom_partitioning import custom_partitioning_p
from jax._src.custom_partitioning_sharding_rule import str_to_sdy_sharding_rule
from jax._src.distributed import global_state as processes
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.interpreters.partial_eval import dce_jaxpr as _dce_jaxpr
from jax._src.lax.lax import _ragged_dot_general_impl as ragged_dot_dense
from jax._src.lax.lax import optimization_barrier_p, split_p, stack_p, tile_p, unstack_p
from jax._src.lax.slicing import scatter_sub_p
from jax._src.lib import _jax as _jaxlib
from jax._src.lib import jax_jit as _jax_jit
from jax._src.numpy.array_methods import _set_array_base_attributes
from jax._src.pjit import reshard_p, sharding_constraint_p
from jax._src.shard_map import shard_map_p
from jax._src.state.types import AbstractRef

try:
    from jax._src.random import core as _random
    from jax._src.random import prng as _prng
except ImportError:  # JAX 0.10 keeps them elsewhere
    from jax._src import prng as _prng  # type: ignore[no-redef,attr-defined]
    from jax._src import random as _random  # type: ignore[no-redef,assignment]

gamma_one, random_clone_p = _random._gamma_one, _random.random_clone_p
clean_up_dead_vars, last_used = _core.clean_up_dead_vars, _core.last_used
is_default_layout = _pxla.is_default_layout
iota_2x32_shape_p = _prng.iota_2x32_shape_p
random_unwrap_p = _prng.random_unwrap_p
random_wrap_p = _prng.random_wrap_p

COMPOSITE_BODY = "call_jaxpr" if jax.__version_info__ >= (0, 11, 2) else "jaxpr"  # of composite_p

_Function = TypeVar("_Function", bound=Callable[..., Any])


def api_boundary(fun: _Function) -> _Function:
    """`fun`, with the frames of JAX and of excluded files filtered from its tracebacks."""
    return _traceback_util.api_boundary(fun)


def exclude_frames(path: Path) -> None:
    """Treat a file or folder as internal: never the user's line, and hidden in tracebacks."""
    source_info_util.register_exclusion(str(path))
    _traceback_util.register_exclusion(str(path))


def private_primitives(module: str, *names: str) -> list[Primitive]:
    """The primitives of a private module that this release of JAX has, by name."""
    try:
        found = importlib.import_module(f"jax._src.{module}")
    except ModuleNotFoundError:  # another release keeps them elsewhere
        return []
    return [getattr(found, name) for name in names if hasattr(found, name)]


def python_implementation(primitive: Primitive) -> Callable[..., Any] | None:
    """The Python function that implements a primitive eagerly; None if it is lowered directly."""
    if primitive.name == "call_hi_primitive":  # brings its own decomposition
        return primitive.to_lojax
    # Sparse operators keep a Python implementation beside the one that calls a GPU library.
    name, implementation = primitive.name, primitive.impl
    module = sys.modules.get(f"jax.experimental.sparse.{name.split('_')[0]}")
    if getattr(module, f"{name}_p", None) is primitive and hasattr(module, f"_{name}_impl"):
        return getattr(module, f"_{name}_impl")
    if getattr(implementation, "func", None) is _dispatch.apply_primitive:
        return None
    return None if getattr(implementation, "__func__", None) is Primitive.impl else implementation


def allowed_in_branches(found: Any) -> bool:
    """Whether JAX allows these effects inside a branch of `cond`."""
    return not _effects.control_flow_allowed_effects.filter_not_in(found)


def discharge_refs(closed: Any) -> Any:
    """The program with its internal references (`jax.new_ref`) discharged into values."""
    if not any(isinstance(e, _core.InternalMutableArrayEffect) for e in closed.effects):
        return closed
    return _pxla._discharge_internal_refs(closed)


def drop_unused(jaxpr: Any) -> Any:
    """Dead code elimination: the program without what no result needs.

    Without JAX's checks: the axes that a plan's collectives name are bound only when it runs.
    """
    with _config.enable_checks(False):
        return _dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def parse_sharding_rule(text: str, settings: Mapping[str, Any]) -> Any:
    """A sharding rule written like an einsum, as `custom_partitioning` takes it."""
    return str_to_sdy_sharding_rule(text, **settings)


@contextlib.contextmanager
def tensor_types(*avals: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """The MLIR types of lists of arrays, valid while the context is open."""
    with mlir.make_ir_context(), mlir.ir.Location.unknown():
        yield [
            [mlir.ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in listed]
            for listed in avals
        ]


def prng_impl(dtype: Any) -> Any:
    """The random number generator of keys of this dtype."""
    return dtype._impl


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants a scan has, and how many carried values."""
    if "ft_in" in params:  # since JAX 0.11: the operands as a tree of three parts
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


# ---------------------------------------------------------------- the C++ dispatch path
#
# `jax.jit` parses its arguments, looks up the executable and passes the buffers in C++. gshard
# uses the same code: JAX calls `cache_miss` once per new signature, and the fast-path data that it
# returns beside the results lets later calls bypass Python.

_programs = _jaxlib.PjitFunctionCache(capacity=8192)


def jit_info(jitted: Any) -> Any:
    """How `jax.jit` parsed its keywords: static and donated arguments, by number and name."""
    return jitted._jit_info


def quick_call(
    fun: Callable[..., Any], cache_miss: Callable[..., Any], static: Any, key: Any
) -> Callable[..., Any]:
    """A function like those that `jax.jit` returns; `static` has its static arguments.

    Its executables are cached by `fun` and `key` and dropped together with `fun`. It holds the
    owner of the method `cache_miss` weakly: the garbage collector sees no reference cycle in C++.
    """
    name, static_arguments = _util.fun_name(fun), (static.static_argnums, static.static_argnames)
    parts = (key, _tree_util.dispatch_registry, _pxla.cc_shard_arg, _programs)
    made = _jaxlib.pjit(name, fun, _weakly(cache_miss), *static_arguments, *parts)
    made._fun = fun  # debug_nans runs this op by op when it finds a NaN
    return made


def quick_call_of_compiled(cache_miss: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs one compiled program, with a cache of its own."""
    parts = ((), _tree_util.dispatch_registry, _pxla.cc_shard_arg)  # no key: no shared cache
    return _jaxlib.pjit("compiled", None, _weakly(cache_miss), [], [], *parts)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        owner = found()
        assert owner is not None
        return owner(*args, **kwargs)

    return call


def quick_data(
    compiled: Any, tree: Any, names: Sequence[Any], consts: Sequence[Any], results: Sequence[Any]
) -> Any:
    """The fast-path data with which later calls bypass Python; None where they cannot.

    They cannot with callbacks, nor where the function closes over random keys.

    `names` are the current shardings of the arguments that were passed on unchanged, and `results`
    have the shardings that the user sees.
    """
    if any(jax.numpy.issubdtype(c.dtype, jax.dtypes.prng_key) for c in consts):
        return None
    executable = compiled._executable
    own = executable.shard_const_args(compiled._params.const_args)
    data = _pjit._get_fastpath_data(executable, tree, names, results, (), (), None, [*own, *consts])
    if data is None or len(data.out_avals) != len(results):
        return None
    kept = [i for i, used in enumerate(data.kept_var_bitvec) if used]
    called = [None] * (len(own) + len(consts)) + list(names)
    into = [called[i] or s for i, s in zip(kept, data.in_shardings, strict=True)]
    return data._replace(in_shardings=into, out_shardings=[r.sharding for r in results])


def parse_arguments(
    static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """A call's signature (trees, names and static arguments), and its flat dynamic arguments."""
    fixed = (static.static_argnums, static.static_argnames, _tree_util.tracing_registry)
    return _jax_jit.parse_arguments(args, tuple(kwargs.values()), tuple(kwargs), *fixed)


def execute(compiled: Any, arrays: Sequence[Any]) -> list[Any]:
    """Run a compiled program on arrays that are known to match, without JAX's checks.

    The checks reject int4 arrays because they compare their layouts wrongly.
    """
    executable = compiled._executable
    own = executable.shard_const_args(compiled._params.const_args)
    return executable.unsafe_call(*own, *arrays)


def closed_over(traced: Any) -> list[Any]:
    """Values that a traced function takes in front of its arguments."""
    return list(traced._consts)


def is_tracing() -> bool:
    """Whether a function is being traced or transformed by JAX right now."""
    return not _core.trace_ctx.is_top_level()


def is_tracer(value: Any) -> bool:
    """Whether this is a tracer."""
    return isinstance(value, _core.Tracer)


def variable_of(value: Any) -> Any:
    """The variable (or literal) that a tracer represents; None for what is no tracer."""
    return getattr(value, "val", None) if is_tracer(value) else None


def is_array_like(value: Any) -> bool:
    """Whether JAX accepts this as an array."""
    return _core.valid_jaxtype(value)


def is_ref(value: Any) -> bool:
    """Whether this is a reference to an array that changes (`jax.new_ref`)."""
    return isinstance(value, _core.Ref)


def ref_value(ref: Any) -> jax.Array:
    """The array in a reference, not a copy of it."""
    return getattr(ref, "_refs", ref)._buf


def set_ref(ref: Any, value: jax.Array) -> None:
    """Put an array into a reference; nothing else may hold that array."""
    getattr(ref, "_refs", ref)._buf = value


def struct_of(value: Any) -> Any:
    """An argument for tracing: its shape and type alone, and its sharding if that is in its type.

    Were the mesh part of the type, every mesh an argument ever had would cause a new trace.
    """
    aval = _core.shaped_abstractify(value)
    if not isinstance(aval, _core.ShapedArray):
        return value
    sharding = value.sharding if aval.sharding.mesh._any_axis_explicit else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of an argument, as a traced function sees them."""
    found = value if isinstance(value, jax.Array) else _core.shaped_abstractify(value)
    return found.shape, found.dtype


fun_name = _util.fun_name
weakref_cache = _util.weakref_lru_cache  # an entry goes with its first argument, or by clear_caches
register_cache = _util.register_cache  # `clear_caches` empties it


def context_mesh() -> Any:
    """The mesh of `jax.set_mesh`, or of `with mesh:`; None outside."""
    mesh = _mesh.get_concrete_mesh()
    if mesh.empty:
        mesh = _mesh.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def copied(eqn: Any, values: Any, types: Any = None, changed: Any = None) -> list[Any] | None:
    """The results of `eqn` on `values`, copied into the program that is being traced.

    The equation keeps its source information, and no rule of JAX runs again: on values of other
    shapes its results have the `types` given, and some parameters are `changed`. None where copying
    is not possible: equations with effects, those that JAX decomposes after tracing
    (`jnp.searchsorted` since 0.12), or a release of JAX that traces in another way.
    """
    trace, info, is_high = _core.trace_ctx.trace, eqn.source_info, eqn.primitive.is_high
    never = getattr(is_high, "__func__", None) is Primitive.is_high  # as of most, which are many
    high = not never and is_high(*(atom.aval for atom in eqn.invars), **eqn.params)
    if eqn.effects or high or not hasattr(trace, "emit_eqn"):
        return None
    if (around := source_info_util.current_name_stack()).stack:
        info = info.replace(name_stack=around + info.name_stack)
    operands = [trace.to_jaxpr_tracer(value, info) for value in values]
    own = eqn.primitive, {**eqn.params, **(changed or {})}, eqn.effects
    return trace.emit_eqn(operands, types or [v.aval for v in eqn.outvars], *own, info, eqn.ctx)


def current_context() -> Any:
    """A context in which traced equations get this equation context."""
    return _core.current_jaxpr_eqn_context()


def is_current(context: Any) -> bool:
    """Whether traced equations get this equation context now, and no mesh is set."""
    return context is _core.current_jaxpr_eqn_context() and context.cur_abstract_mesh.empty


def without_mesh() -> Any:
    """A context in which no mesh is set: a partitioned program has its own."""
    return _NoMesh()


_contexts: Any = _mesh if hasattr(_mesh, "device_context") else _config  # since JAX 0.11: _mesh


class _NoMesh:
    def __enter__(self) -> None:
        nothing = _mesh.empty_concrete_mesh if _contexts is _mesh else None
        empty = _mesh.empty_abstract_mesh
        self.abstract = _contexts.abstract_mesh_context_manager.swap_local(empty)
        self.concrete = _contexts.device_context.swap_local(nothing)

    def __exit__(self, *_: object) -> None:
        _contexts.abstract_mesh_context_manager.set_local(self.abstract)
        _contexts.device_context.set_local(self.concrete)


def register_array_type(
    cls: type, sharding: type, aval: Callable[..., Any], array: Any, named: Callable[..., Any]
) -> None:
    """Make JAX accept `cls` as an array: `aval` gives its type, `array` converts it to a
    `jax.Array`, and `named` gives its sharding.
    """
    _set_array_base_attributes(cls, exclude=set(vars(cls)))
    _core.pytype_aval_mappings[cls] = aval
    _dtypes.register_canonicalize_value_handler(cls, None)

    def shard(values: Sequence[Any], shardings: Sequence[Any], layouts: Any, copies: Any) -> Any:
        wanted = [named(s) if isinstance(s, sharding) else s for s in shardings]
        return _pxla.shard_args(wanted, layouts, copies, [array(v) for v in values])

    _pxla.shard_arg_handlers[cls] = shard


__all__ = [  # of JAX's own names
    "AbstractRef", "InternalFloatingPointError", "Var", "ad", "batching", "custom_partitioning_p",
    "mlir", "optimization_barrier_p", "processes", "ragged_dot_dense", "remat_p", "reshard_p",
    "scatter_sub_p", "shard_map_p", "sharding_constraint_p", "source_info_util", "split_p",
    "stack_p", "tile_p", "unstack_p",
]  # fmt: skip
