"""Kernels in Pallas, and functions whose gradients are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def with_gradient(
    backward: Callable[..., Any],
    keep: Callable[..., Any] = lambda result, *args: args,
    nondiff: Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function whose gradient is `backward` of what `keep` takes, and the result's.

    `keep` takes of the result and the arguments; the ones at `nondiff` come first in `backward`.
    """

    def decorated(function: Callable[..., Any]) -> Any:
        called = jax.custom_vjp(function, nondiff_argnums=nondiff)

        def forward(*args: Any) -> tuple[Any, Any]:
            result = called(*args)
            return result, keep(result, *args)

        called.defvjp(forward, backward)
        return called

    return decorated
