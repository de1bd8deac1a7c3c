"""Everything gshard takes from JAX's private modules, so that a new release is adapted to here."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import core, dispatch, effects, source_info_util
from jax._src.ad_checkpoint import remat_p
from jax._src.core import Primitive, Var
from jax._src.custom_partitioning import custom_partitioning_p
from jax._src.custom_partitioning_sharding_rule import str_to_sdy_sharding_rule
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters.partial_eval import dce_jaxpr
from jax._src.lax.lax import optimization_barrier_p, split_p, stack_p, tile_p, unstack_p
from jax._src.lax.slicing import scatter_sub_p

try:
    from jax._src.random import core as _random
    from jax._src.random import prng as _prng
except ImportError:  # modules of an older layout
    from jax._src import prng as _prng  # type: ignore[no-redef,attr-defined]
    from jax._src import random as _random  # type: ignore[no-redef,assignment]

gamma_one = _random._gamma_one
iota_2x32_shape_p = _prng.iota_2x32_shape_p
random_clone_p = _random.random_clone_p
random_unwrap_p = _prng.random_unwrap_p
random_wrap_p = _prng.random_wrap_p


# The parameter of the primitive `composite` that holds its body.
COMPOSITE_BODY = "call_jaxpr" if jax.__version_info__ >= (0, 11, 2) else "jaxpr"


def private_primitives(module: str, *names: str) -> list[Primitive]:
    """Primitives of a private module by name; those that a release does not have are left out."""
    found = importlib.import_module(f"jax._src.{module}")
    return [getattr(found, name) for name in names if hasattr(found, name)]


def python_implementation(primitive: Primitive) -> Callable[..., Any] | None:
    """The Python function that a primitive is outside of `jit`; None if XLA alone has it."""
    implementation = primitive.impl
    if getattr(implementation, "func", None) is dispatch.apply_primitive:
        return None
    return None if getattr(implementation, "__func__", None) is Primitive.impl else implementation


def allowed_in_branches(found: Any) -> bool:
    """Whether effects may happen on one side of a `cond` alone."""
    return not effects.control_flow_allowed_effects.filter_not_in(found)


def discharge_refs(closed: Any) -> Any:
    """The program with the references that it makes replaced by the values in them."""
    if not any(isinstance(e, core.InternalMutableArrayEffect) for e in closed.effects):
        return closed
    return pxla._discharge_internal_refs(closed)


def parse_sharding_rule(text: str, settings: Mapping[str, Any]) -> Any:
    """A sharding rule written like an einsum, as `custom_partitioning` takes it."""
    return str_to_sdy_sharding_rule(text, **settings)


@contextlib.contextmanager
def tensor_types(*avals: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """Lists of arrays as the types of MLIR, which live as long as the context."""
    with mlir.make_ir_context(), mlir.ir.Location.unknown():
        yield [
            [mlir.ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in listed]
            for listed in avals
        ]


def prng_impl(dtype: Any) -> Any:
    """The generator of random keys of this dtype."""
    return dtype._impl


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants a scan has, and how many carried values."""
    if "ft_in" in params:  # since JAX 0.11: the operands as a tree of three parts
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


__all__ = [
    "COMPOSITE_BODY",
    "Var",
    "ad",
    "allowed_in_branches",
    "batching",
    "custom_partitioning_p",
    "dce_jaxpr",
    "discharge_refs",
    "gamma_one",
    "iota_2x32_shape_p",
    "mlir",
    "optimization_barrier_p",
    "parse_sharding_rule",
    "private_primitives",
    "prng_impl",
    "python_implementation",
    "random_clone_p",
    "random_unwrap_p",
    "random_wrap_p",
    "remat_p",
    "scan_counts",
    "scatter_sub_p",
    "source_info_util",
    "split_p",
    "stack_p",
    "tensor_types",
    "tile_p",
    "unstack_p",
]
