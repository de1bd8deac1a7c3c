"""What `Lowered` and `Compiled` have in common: the arguments and results of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from gshard import _jax
from gshard.capture.calls import Trees


class Stage:
    """The arguments and results of a program, as `jax.stages` describes them."""

    trees: Trees

    args_info = property(lambda self: self.trees.args_info)
    in_tree = property(lambda self: self.trees.in_tree)
    in_avals = property(lambda self: jax.tree.map(lambda info: info._aval, self.trees.args_info))
    donate_argnums = property(lambda self: self.trees.donated)
    out_info = property(lambda self: self.trees.out_info)
    out_tree = property(lambda self: self.trees.out_tree)

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


def _named(types: Sequence[tuple[Any, ...]]) -> str:
    return "(" + ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types) + ")"
