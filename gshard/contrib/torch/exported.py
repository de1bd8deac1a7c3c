"""An exported module as a function of JAX: `torch.export`'s graph, node by node."""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import logging
import operator
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._decomp import get_decompositions

from gshard.contrib.torch.arrays import INDEXING, POINTWISE, REDUCTIONS, SHAPES, Operator
from gshard.contrib.torch.layers import LAYERS, RANDOM
from gshard.graph.source import MODULE

OPERATORS = POINTWISE | REDUCTIONS | SHAPES | INDEXING | LAYERS | RANDOM

# Kept as they are where torch would decompose them: see `layers.py`. `detach` would be lost.
_KEPT = "linear matmul einsum scaled_dot_product_attention detach lstm gru silu stack"
# Decomposed by torch although they are core operators.
_DECOMPOSED = (
    "_adaptive_avg_pool2d _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training addmm bucketize elu hardtanh index_select "
    "leaky_relu linalg_vector_norm upsample_bilinear2d upsample_nearest2d"
)
_NOTHING = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")
# Arguments without a meaning for JAX, which has one layout and one device.
_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")

# Files of no model, and types of its modules that are torch's own.
_INTERNAL = (str(Path(torch.__file__).parent), __file__, "<")
_TORCH_TYPES = ("torch.", "<class 'torch.")


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
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def _line_of(error: BaseException) -> str:
    """Where the model's code was when the export failed."""
    places = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [f" (at {path}:{line})" for path, line in places if not path.startswith(_INTERNAL)]
    return ["", *own][-1]


def _decompositions() -> Any:
    table = torch.export.default_decompositions()
    table.update(get_decompositions([getattr(torch.ops.aten, n) for n in _DECOMPOSED.split()]))
    for name in _KEPT.split():
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
    lines = [(path, int(line)) for path, line in found if not path.startswith(_INTERNAL)]
    stack = (node.meta.get("nn_module_stack") or {}).values()
    modules = ["", *(path for path, kind in stack if not str(kind).startswith(_TORCH_TYPES))]
    return *(lines or [("unknown", 1)])[-1], modules[-1]


def framed(path: str, line: int, module: str) -> Callable[..., Any]:
    """A call whose frame has this file and line, from which JAX takes an operation's source."""
    code: types.CodeType = (lambda function, args, kwargs: function(*args, **kwargs)).__code__
    units = len(code.co_code) // 2
    # One line and no columns for all instructions: entries of kind 13 for up to 8 units each.
    table = b"".join(bytes((0x80 | 13 << 3 | min(8, units - n) - 1, 0)) for n in range(0, units, 8))
    name = MODULE + module
    code = code.replace(
        co_filename=path, co_firstlineno=line, co_linetable=table, co_name=name, co_qualname=name
    )
    return types.FunctionType(code, {"__builtins__": builtins})  # with which C code imports


class ExportedGraph:
    """A graph of torch that runs on JAX's arrays."""

    def __init__(self, module: Any, lowerings: Any, shown: str, remat: str | None):
        self.nodes = list(module.graph.nodes)
        missing: dict[Any, str] = {}
        self._steps = {node: self._step(node, lowerings, missing) for node in self.nodes}
        inside = itertools.groupby(self.nodes, lambda node: _matching(node, remat))
        self._blocks = [(path, [*nodes]) for path, nodes in inside]
        if remat and not any(path for path, _ in self._blocks):
            raise ValueError(f"remat={remat!r} is the path of no module of {shown}")
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
        return found, framed(path, line, module), name in RANDOM and node.target not in lowerings

    def __call__(self, inputs: list[Any], key: Any) -> list[Any]:
        """The outputs for these inputs, in the order of the graph; `key` draws random numbers."""
        given, drawn = iter(inputs), itertools.count(1)

        def random(node: Any) -> Any:
            if key is None:
                raise ValueError(
                    f"{'{}:{}, {}'.format(*place_of(node))}: {name_of(node)} draws random numbers: "
                    "call the function with key=jax.random.key(0), or export after module.eval()"
                )
            return jax.random.fold_in(key, next(drawn))

        def run(node: Any, values: Any, function: Operator, call: Operator, draws: bool) -> Any:
            def read(a: Any) -> Any:
                own = values[a] if isinstance(a, torch.fx.Node) else a
                return dtype_of(own) if isinstance(own, torch.dtype) else own

            args, kwargs = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), read)
            kept = {name: value for name, value in kwargs.items() if name not in _DROPPED}
            drawing = {"random": partial(random, node)} if draws else {}
            return call(function, args, kept | drawing)

        def run_all(nodes: list[Any], values: dict[Any, Any]) -> None:
            for node in nodes:
                step = self._steps[node]
                if node.op == "placeholder":
                    values[node] = next(given)
                elif node.target is operator.getitem:
                    values[node] = values[node.args[0]][node.args[1]]
                elif step is not None:
                    values[node] = _cast(run(node, values, *step), node.meta.get("val"))

        values: dict[Any, Any] = {}
        for path, nodes in self._blocks:
            (partial(_run_again, run_all) if path else run_all)(nodes, values)
        return list(torch.fx.node.map_arg(self.nodes[-1].args[0], values.__getitem__))


def _matching(node: Any, remat: str | None) -> str:
    """The path of the outermost module that a node is in and `remat` matches; else none."""
    stack = (node.meta.get("nn_module_stack") or {}).values() if remat else ()
    return next((path for path, _ in stack if re.fullmatch(remat or "", path)), "")


def _run_again(run_all: Any, nodes: list[Any], values: dict[Any, Any]) -> None:
    """Run nodes whose values are not kept for the gradients, but those that others read."""
    own = set(nodes)
    reads = [*dict.fromkeys(r for node in nodes for r in node.all_input_nodes if r not in own)]
    wanted = [node for node in nodes if not own.issuperset(node.users) and node.users]

    def block(*given: Any) -> list[Any]:
        local = dict(zip(reads, given, strict=True))
        run_all(nodes, local)
        return [local.get(node) for node in wanted]

    found = jax.checkpoint(block)(*(values.get(node) for node in reads))
    values.update(zip(wanted, found, strict=True))


def _cast(result: Any, expected: Any) -> Any:
    """A result in torch's types."""
    if isinstance(result, tuple | list):
        kinds = expected if isinstance(expected, tuple | list) else [None] * len(result)
        return [_cast(r, e) for r, e in zip(result, kinds, strict=False)]
    if result is None or not isinstance(expected, torch.Tensor):
        return result
    return jnp.asarray(result, dtype_of(expected.dtype))
