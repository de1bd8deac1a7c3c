"""Small graphs of matrix products, which ONNX Runtime runs with weights that it arranged once.

A weight is [inputs, outputs], in float32 or as 8-bit numbers with a scale for each output. For a
product in 8 bits each row of the activations gets a scale of its own, so that a result does not
depend on the rows beside it. Both operands are unsigned with a zero point of 128: the sums are
exact on every processor, also on those whose products of signed numbers saturate.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from gshard.nn.config import EPSILON, Int8

Weight = np.ndarray | Int8
Dtype = Literal["float32", "int64", "uint8"]

_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "uint8": TensorProto.UINT8}
MICROSOFT = "com.microsoft"
_OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
ZERO = 128  # the unsigned number for zero
_LEAST = 1e-30  # a row of zeros has a scale too
_pool: list[int] = []  # the threads that all sessions of this process share, once they are there


def use_threads(count: int = 0) -> int:
    """Have products use `count` threads, 0: a thread for each processor; the first call decides."""
    if not _pool:
        _pool.append(count or len(os.sched_getaffinity(0)))
        onnxruntime.set_global_thread_pool_sizes(_pool[0], 1)
    return _pool[0]


def floats(weight: Weight) -> np.ndarray:
    """A weight in float32."""
    return weight.astype(np.float32, copy=False)


class OnnxOutput(NamedTuple):
    """A value that a graph returns, and its type."""

    name: str
    dtype: Dtype = "float32"


class QuantizedRows(NamedTuple):
    """Activations in 8 bits: the names of the values, and of the scales of the rows."""

    values: str
    scale: str
    zero: int  # which number is zero


class OnnxGraph:
    """A graph that is being written: each method adds nodes and returns the name of their value."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []

    def input(self, name: str, dtype: Dtype = "float32", dims: int = 2) -> str:
        """An array that the graph is called with, of any size in each of its dims."""
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], [None] * dims))
        return name

    def constant(self, value: np.ndarray | np.generic) -> str:
        """An array that belongs to the graph."""
        name = f"c{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """A node of ONNX: the name of its value, or of several."""
        names = [f"v{len(self._nodes)}.{n}" for n in range(outputs)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def norm(self, x: str, scale: Weight, bias: Weight) -> str:
        """Layer normalization."""
        both = (self.constant(floats(each)) for each in (scale, bias))
        return self.add("LayerNormalization", x, *both, epsilon=EPSILON)

    def product(self, x: str | QuantizedRows, weight: Weight, bias: Weight | None = None) -> str:
        """The rows of `x` times a weight; rows that several products share may come quantized."""
        if bias is not None:
            return self.add("Add", self.product(x, weight), self.constant(floats(bias)))
        if not isinstance(weight, Int8):
            assert isinstance(x, str)
            return self.add("MatMul", x, self.constant(floats(weight)))
        rows = self.quantized(x) if isinstance(x, str) else x
        unsigned = (weight.values.astype(np.int16) + ZERO).astype(np.uint8)
        product = self.add(
            "MatMulIntegerToFloat",
            rows.values,
            self.constant(unsigned),
            self.constant(np.float32(1)),
            self.constant(weight.scale.reshape(-1)),
            self.constant(np.uint8(rows.zero)),
            self.constant(np.full(unsigned.shape[1], ZERO, np.uint8)),
            domain=MICROSOFT,
        )
        return self.add("Mul", product, rows.scale)

    def quantized(self, x: str, *, positive: bool = False) -> QuantizedRows:
        """The rows in 8 bits, each with a scale; without a sign if all of them are `positive`."""
        least = self.constant(np.float32(_LEAST))
        largest = self.add("ReduceMax", x if positive else self.add("Abs", x), self._last)
        part = self.constant(np.float32(1 / 255 if positive else 1 / 127))
        scale = self.add("Max", self.add("Mul", largest, part), least)
        flat = self.add("Squeeze", scale, self._last)
        if positive:
            return QuantizedRows(self.add("QuantizeLinear", x, flat, axis=0), scale, 0)
        zero = numpy_helper.from_array(np.array([ZERO], np.uint8))
        zeros = self.add("ConstantOfShape", self.add("Shape", flat), value=zero)
        return QuantizedRows(self.add("QuantizeLinear", x, flat, zeros, axis=0), scale, ZERO)

    @functools.cached_property
    def _last(self) -> str:
        return self.constant(np.array([-1]))

    def compile(self, *outputs: str | OnnxOutput) -> Session:
        """The graph, ready to run."""
        found = [OnnxOutput(each) if isinstance(each, str) else each for each in outputs]
        returned = [
            helper.make_tensor_value_info(each.name, _TYPES[each.dtype], None) for each in found
        ]
        graph = helper.make_graph(self._nodes, "products", self._inputs, returned, self._constants)
        return Session(helper.make_model(graph, opset_imports=_OPSETS, ir_version=10))


class Session:
    """A compiled graph; called with its inputs, it returns its outputs in order."""

    def __init__(self, model: Any):
        use_threads()
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        # There are as many sessions as experts: none keeps memory for itself.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [each.name for each in self._session.get_inputs()]

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """The outputs."""
        return self._session.run(None, dict(zip(self._inputs, inputs, strict=True)))
