"""Modules of PyTorch as functions of JAX: `function, params = from_torch(module, inputs)`.

The module is exported by `torch.export`, and its operators (core ATen) are run by JAX. Nothing of
torch is left in the function: it is differentiated, annotated, explained, forecast and partitioned
like any other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from gshard.contrib.torch.arrays import Operator
from gshard.contrib.torch.exported import ExportedGraph, as_jax, export_module

_OWN = ("key", "buffers")
_flat, _unflat = pytree.tree_flatten, pytree.tree_unflatten  # in torch's trees, None is a leaf


def from_torch(
    module: torch.nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    lowerings: Mapping[Any, Operator] | None = None,
    remat: str | None = None,
) -> tuple[TorchFunction, dict[str, Any]]:
    """A module as a pure function of JAX, and its parameters under their torch names.

    The mode of the module, training or evaluation, and the shapes of the inputs are those of the
    export. Under `torch.device("meta")` no weights are made: the parameters are
    `jax.ShapeDtypeStruct`s, which `gshard.jit(...).lower`, `forecast` and `gshard.auto` take.

    Args:
        module: any `torch.nn.Module` that `torch.export` can export.
        example_inputs: the tensors it is called with, a tuple; one tensor stands for itself.
        example_kwargs: those by name.
        lowerings: functions of JAX for operators that gshard has none for, such as
            `{torch.ops.mine.scale.default: lambda x, by: x * by}`.
        remat: modules whose values are computed again for the gradients (`jax.checkpoint`), by a
            regular expression of their whole path, such as `"model.layers.[0-9]+"`.

    Returns:
        `function(params, *inputs, **kwargs)`, whose result has the module's own structure; and
        `params`, by name. Parameters that share one tensor have one entry, under the first name.
        See `TorchFunction` for dropout and buffers.

    Raises:
        ValueError: for what cannot be exported, with torch's reason and the line, and for an
            operator that has no counterpart.

    Example:
        ```python
        import gshard, jax, torch
        from gshard.contrib.torch import from_torch

        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        function, params = from_torch(model, torch.zeros(16, 8))

        @gshard.jit
        def step(params, x):
            loss = lambda p: (function(p, gshard.split(x, 0, 8)) ** 2).mean()
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))
        ```
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    kwargs = dict(example_kwargs or {})
    if taken := [name for name in _OWN if name in kwargs]:
        raise ValueError(f"{taken[0]}= is a keyword of the function: give the module's by position")
    named = dict(module.named_parameters(remove_duplicate=False))
    if any(p.device.type == "meta" for p in named.values()):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
    program = export_module(module, args, kwargs)
    first: dict[int, str] = {}
    same = {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}
    graph = ExportedGraph(program.graph_module, lowerings or {}, type(module).__name__, remat)
    function = TorchFunction(program, graph, same, (args, kwargs), module)
    return function, {name: as_jax(named[name]) for name in first.values()}


class TorchFunction:
    """What `from_torch` makes of a module: call it with parameters and the module's inputs.

    `buffers` are the module's, under their names, such as the running means of a BatchNorm. They
    are constants of a call, unless it is given `buffers=`: then it returns its result and the
    buffers after it. Buffers on the meta device have no values: they read as NaN.

    `key=` draws the numbers of dropout and the like, in a module that was exported in training
    mode.
    """

    def __init__(self, program: Any, graph: ExportedGraph, same: Any, inputs: Any, module: Any):
        self.__name__, self._graph, self._same = type(module).__name__, graph, same
        signature = program.graph_signature
        self._reads = [(spec.kind.name, spec.target) for spec in signature.input_specs]
        self._writes = [(spec.kind.name, spec.target) for spec in signature.output_specs]
        self._inputs, self._spec = _flat(inputs)
        self._names = list(inputs[1])
        self._result = _for_jax(program.call_spec.out_spec)
        values = {**dict(module.named_buffers(remove_duplicate=False)), **program.constants}
        self._constants = {n: as_jax(x) for n, x in values.items() if isinstance(x, torch.Tensor)}
        self.buffers: dict[str, Any] = {name: self._constants[name] for name in signature.buffers}

    def __call__(
        self, params: Mapping[str, Any], *args: Any, key: Any = None, buffers: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The module's result; with `buffers`, also the buffers after the call."""
        given = iter(self._checked(args, kwargs))
        state = {**self._constants, **(self.buffers if buffers is None else buffers)}
        read: dict[str, Any] = {
            "USER_INPUT": lambda _: next(given),
            "PARAMETER": partial(self._parameter, params),
        }
        held = lambda name: _with_values(state[name])  # noqa: E731
        inputs = [read.get(kind, held)(name) for kind, name in self._reads]
        outputs = [*zip(self._graph(inputs, key), self._writes, strict=True)]
        result = _unflat([x for x, (kind, _) in outputs if kind == "USER_OUTPUT"], self._result)
        if buffers is None:
            return result
        changed = {name: x for x, (kind, name) in outputs if kind == "BUFFER_MUTATION"}
        return result, {name: changed.get(name, value) for name, value in buffers.items()}

    def _parameter(self, params: Mapping[str, Any], name: str) -> Any:
        if self._same[name] not in params:
            raise ValueError(
                f"{self.__name__} has a parameter {self._same[name]!r}, which is not among those "
                f"given: {', '.join(map(repr, list(params)[:4]))}, ..."
            )
        return params[self._same[name]]

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The inputs in order, if they are as in the export."""
        ordered = {name: kwargs[name] for name in self._names if name in kwargs}
        leaves, spec = _flat((args, {**ordered, **kwargs}))
        if spec != self._spec:
            raise ValueError(
                f"{self.__name__} was exported for inputs {self._spec}, and is given {spec}"
            )
        pairs = [*zip(leaves, self._inputs, strict=True)]
        for given, example in pairs:
            shape = getattr(example, "shape", None)
            if shape is not None and tuple(np.shape(given)) != tuple(shape):
                raise ValueError(
                    f"{self.__name__} was exported for an input of shape {tuple(shape)}, and is "
                    f"given one of shape {np.shape(given)}: export it with that shape"
                )
        return [x if isinstance(example, torch.Tensor) else example for x, example in pairs]

    def __repr__(self) -> str:
        return f"<gshard.contrib.torch: {self.__name__} of {len(self._inputs)} inputs>"


def _with_values(array: Any) -> Any:
    """An array, or NaN in the place of one that has no values."""
    if not isinstance(array, jax.ShapeDtypeStruct):
        return array
    whole = jnp.issubdtype(array.dtype, jnp.integer)
    return jnp.full(array.shape, -1 if whole else jnp.nan, array.dtype)


def _for_jax(spec: Any) -> Any:
    """`spec`, whose own types, such as Hugging Face's outputs, are made known to JAX."""
    if spec.type is not None and jax.tree_util.all_leaves([_unflat([0] * spec.num_leaves, spec)]):
        jax.tree_util.register_pytree_node(
            spec.type, _flat, lambda own, leaves: _unflat(list(leaves), own)
        )
    for child in spec.children():
        _for_jax(child)
    return spec
