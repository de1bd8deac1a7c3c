"""Modules of PyTorch as functions of JAX: `function, params = from_torch(module, inputs)`.

The module is exported by `torch.export`, and its operators (core ATen) are run by JAX. Nothing of
torch is left in the function: it is differentiated, annotated, explained, forecast and partitioned
like any other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gshard.contrib.torch.exported import ExportedGraph, as_jax, export_module
from gshard.contrib.torch.pointwise import Operator
from gshard.contrib.torch.trees import flat, for_jax, unflat

_OWN = ("key", "buffers")


def from_torch(
    module: torch.nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    lowerings: Mapping[Any, Operator] | None = None,
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
        leaves, structure = flat((args, kwargs))
        moved = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = unflat(moved, structure)
    program = export_module(module, args, kwargs)
    first: dict[int, str] = {}
    same = {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}
    function = TorchFunction(program, same, (args, kwargs), dict(lowerings or {}), module)
    return function, {name: as_jax(named[name]) for name in first.values()}


class TorchFunction:
    """What `from_torch` makes of a module: call it with parameters and the module's inputs.

    `buffers` are the module's, under their names, such as the running means of a BatchNorm. They
    are constants of a call, unless it is given `buffers=`: then it returns its result and the
    buffers after it. Buffers on the meta device have no values: they read as NaN.

    `key=` draws the numbers of dropout and the like, in a module that was exported in training
    mode.
    """

    def __init__(
        self, program: Any, same: dict[str, str], inputs: Any, lowerings: Any, module: Any
    ):
        self.__name__ = type(module).__name__
        self._graph = ExportedGraph(program.graph_module, lowerings, self.__name__)
        self._signature, self._same = program.graph_signature, same
        self._inputs, self._spec = flat(inputs)
        self._names = list(inputs[1])
        self._result = for_jax(program.call_spec.out_spec)
        values = {**dict(module.named_buffers(remove_duplicate=False)), **program.constants}
        kept = self._signature.buffers
        self.buffers: dict[str, Any] = {name: as_jax(values[name]) for name in kept}
        self._constants = {
            name: as_jax(x) for name, x in values.items() if isinstance(x, torch.Tensor)
        }

    def __call__(
        self,
        params: Mapping[str, Any],
        *args: Any,
        key: Any = None,
        buffers: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The module's result; with `buffers`, also the buffers after the call."""
        given = iter(self._checked(args, kwargs))
        state = {**self._constants, **(self.buffers if buffers is None else buffers)}
        inputs = []
        for spec in self._signature.input_specs:
            name = spec.target
            if spec.kind.name == "USER_INPUT":
                inputs.append(next(given))
            elif spec.kind.name == "PARAMETER":
                inputs.append(self._parameter(params, name))
            else:
                inputs.append(_with_values(state[name]))
        outputs = self._graph(inputs, key)
        specs = self._signature.output_specs
        results = [x for x, s in zip(outputs, specs, strict=True) if s.kind.name == "USER_OUTPUT"]
        result = unflat(results, self._result)
        if buffers is None:
            return result
        changed = {
            s.target: x
            for x, s in zip(outputs, specs, strict=True)
            if s.kind.name == "BUFFER_MUTATION"
        }
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
        leaves, spec = flat((args, {**ordered, **kwargs}))
        if spec != self._spec:
            raise ValueError(
                f"{self.__name__} was exported for inputs {self._spec}, and is given {spec}"
            )
        for given, example in zip(leaves, self._inputs, strict=True):
            shape = getattr(example, "shape", None)
            if shape is not None and tuple(np.shape(given)) != tuple(shape):
                raise ValueError(
                    f"{self.__name__} was exported for an input of shape {tuple(shape)}, and is "
                    f"given one of shape {np.shape(given)}: export it with that shape"
                )
        return [
            x if isinstance(e, torch.Tensor) else e
            for x, e in zip(leaves, self._inputs, strict=True)
        ]

    def __repr__(self) -> str:
        return f"<gshard.contrib.torch: {self.__name__} of {len(self._inputs)} inputs>"


def _with_values(array: Any) -> Any:
    """An array, or NaN in the place of one that has no values."""
    if not isinstance(array, jax.ShapeDtypeStruct):
        return array
    kinds = {"f": jnp.nan, "c": jnp.nan, "i": -1}
    return jnp.full(array.shape, kinds.get(np.dtype(array.dtype).kind, jnp.nan), array.dtype)
