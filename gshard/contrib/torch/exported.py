"""An exported module as a function of JAX: `torch.export`'s graph, node by node."""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._decomp import get_decompositions

from gshard.contrib.torch.arrays import INDEXING, SHAPES
from gshard.contrib.torch.layers import LAYERS, RANDOM
from gshard.contrib.torch.pointwise import POINTWISE, REDUCTIONS, Operator
from gshard.graph.source import MODULE

OPERATORS: dict[str, Operator] = {
    **POINTWISE, **REDUCTIONS, **SHAPES, **INDEXING, **LAYERS, **RANDOM,
}  # fmt: skip

# Kept as they are where torch would decompose them: see `layers.py`. `detach` would be lost.
_KEPT = (
    "linear",
    "matmul",
    "einsum",
    "scaled_dot_product_attention",
    "detach",
    "lstm",
    "gru",
    "silu",
)
# Decomposed by torch although they are core operators.
_DECOMPOSED = (
    "_adaptive_avg_pool2d _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training bucketize elu hardtanh leaky_relu linalg_vector_norm "
    "upsample_bilinear2d upsample_nearest2d"
)
_NOTHING = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")
# Arguments without a meaning for JAX, which has one layout and one device.
_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")

_TORCH = str(Path(torch.__file__).parent)


def export_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's program of core ATen operators; what torch cannot export is one line."""
    with _quiet():
        try:
            program = torch.export.export(module, args, kwargs, strict=False)
            _detach_without_gradients(program)
            return program.run_decompositions(_decompositions())
        except Exception as error:  # torch raises errors of many kinds here
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f"torch.export cannot export {type(module).__name__}: {reason[0]}{_line_of(error)}"
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the graphs and hints that torch writes where an export fails: the error has it."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _line_of(error: BaseException) -> str:
    """Where the model's code was when the export failed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_internal(f.filename)]
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""


def _is_internal(path: str) -> bool:
    return path.startswith((_TORCH, "<")) or path == __file__


def _decompositions() -> Any:
    table = torch.export.default_decompositions()
    table.update(get_decompositions([getattr(torch.ops.aten, n) for n in _DECOMPOSED.split()]))
    for name in _KEPT:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    return table


def _detach_without_gradients(program: Any) -> None:
    """Detach what leaves a region under `torch.no_grad`, which decompositions forget."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled" or node.args[0]:
            continue
        for read in list(node.users):
            with graph.inserting_after(read):
                cut = graph.call_function(torch.ops.aten.detach.default, (read,))
            cut.meta = dict(read.meta)
            read.replace_all_uses_with(cut, lambda user, cut=cut: user is not cut)
    program.graph_module.recompile()


def dtype_of(dtype: torch.dtype) -> Any:
    """JAX's type for one of torch: in 32 bits where JAX has no 64."""
    return jax.dtypes.canonicalize_dtype(jnp.dtype(str(dtype).removeprefix("torch.")))


def as_jax(tensor: torch.Tensor) -> Any:
    """A copy of a tensor as a JAX array; one without values as its shape and type."""
    dtype = dtype_of(tensor.dtype)
    if tensor.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)
    values = tensor.detach().cpu()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        values = values.float()  # NumPy has no bfloat16
    return jnp.array(np.asarray(values), dtype)


def name_of(node: Any) -> str:
    """The name of a node's operator, without its overload."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name if schema else getattr(node.target, "__name__", str(node.target))
    return name.rpartition("::")[2]


def place_of(node: Any) -> tuple[str, int, str]:
    """File and line of the model's code that made a node, and its module.

    Modules and lines of torch itself are left out: of `self.down_proj(x)` it is that line, in the
    module that has `down_proj`.
    """
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    lines = [(path, int(line)) for path, line in found if not _is_internal(path)]
    stack = (node.meta.get("nn_module_stack") or {}).values()
    modules = [
        path for path, kind in stack if not str(kind).startswith(("torch.", "<class 'torch."))
    ]
    path, line = lines[-1] if lines else ("unknown", 1)
    return path, line, (modules or [""])[-1]


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def framed(path: str, line: int, module: str) -> Callable[..., Any]:
    """A call whose frame has this file and line, from which JAX takes an operation's source."""
    code = _call.__code__
    units = len(code.co_code) // 2
    # One line and no columns for all instructions: entries of kind 13 for up to 8 units each.
    table = b"".join(bytes((0x80 | 13 << 3 | min(8, units - n) - 1, 0)) for n in range(0, units, 8))
    name = MODULE + module
    code = code.replace(
        co_filename=path, co_firstlineno=line, co_linetable=table, co_name=name, co_qualname=name
    )
    return types.FunctionType(code, {})


class ExportedGraph:
    """A graph of torch that runs on JAX's arrays."""

    def __init__(self, module: Any, lowerings: Mapping[Any, Operator], shown: str):
        self.nodes = list(module.graph.nodes)
        missing: dict[Any, str] = {}
        self._steps = [self._step(node, lowerings, missing) for node in self.nodes]
        if missing:
            raise ValueError(
                f"{next(iter(missing.values())) or shown}: {', '.join(map(str, missing))} has no "
                "counterpart in JAX here: give one by lowerings={operator: function}"
            )

    def _step(self, node: Any, lowerings: Mapping[Any, Operator], missing: dict[Any, str]) -> Any:
        name = name_of(node)
        if node.op != "call_function" or node.target is operator.getitem or name in _NOTHING:
            return None
        path, line, module = place_of(node)
        found = lowerings.get(node.target) or OPERATORS.get(name)
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        if found is None or ("pool" in name and 1 in read):
            missing.setdefault(node.target, f"{path}:{line}, {module}".removesuffix(", "))
        draws = name in RANDOM and node.target not in lowerings
        return found, framed(path, line, module), draws, name

    def __call__(self, inputs: list[Any], key: Any) -> list[Any]:
        """The outputs for these inputs, in the order of the graph."""
        values: dict[Any, Any] = {}
        given = iter(inputs)
        random = _Keys(key)
        for node, step in zip(self.nodes, self._steps, strict=True):
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return list(torch.fx.node.map_arg(node.args[0], values.__getitem__))
            elif node.target is operator.getitem:
                values[node] = values[node.args[0]][node.args[1]]
            elif step is not None:
                values[node] = self._run(node, step, values, random)
        raise AssertionError("a graph of torch ends with its output")

    def _run(self, node: Any, step: Any, values: dict[Any, Any], random: _Keys) -> Any:
        function, call, draws, _ = step
        args, kwargs = torch.fx.node.map_aggregate(
            (node.args, dict(node.kwargs)),
            lambda a: values[a] if isinstance(a, torch.fx.Node) else _converted(a),
        )
        kwargs = {name: value for name, value in kwargs.items() if name not in _DROPPED}
        if draws:
            kwargs["random"] = random.at(node)
        return _cast(call(function, args, kwargs), node.meta.get("val"))


class _Keys:
    """New keys for each operator that draws numbers."""

    def __init__(self, key: Any):
        self.key, self.count = key, 0

    def at(self, node: Any) -> Callable[[], Any]:
        def draw() -> Any:
            if self.key is None:
                path, line, module = place_of(node)
                raise ValueError(
                    f"{path}:{line}, {module}: {name_of(node)} draws random numbers: call the "
                    "function with key=jax.random.key(0), or export after module.eval()"
                )
            self.count += 1
            return jax.random.fold_in(self.key, self.count)

        return draw


def _converted(value: Any) -> Any:
    return dtype_of(value) if isinstance(value, torch.dtype) else value


def _cast(result: Any, expected: Any) -> Any:
    """A result in torch's types."""
    if isinstance(result, tuple | list):
        kinds = expected if isinstance(expected, tuple | list) else [None] * len(result)
        return [_cast(r, e) for r, e in zip(result, kinds, strict=False)]
    if result is None or not isinstance(expected, torch.Tensor):
        return result
    return jnp.asarray(result, dtype_of(expected.dtype))
