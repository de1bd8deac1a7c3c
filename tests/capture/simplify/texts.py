"""Programs before and after a pass, as text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from gshard.capture.flatten import inline
from gshard.capture.placement import device_order
from gshard.graph.history import Pass, program_text
from gshard.graph.regions import walk


def flat(fn: Callable, *arguments: Any) -> ClosedJaxpr:
    """The flat program of a function, as the passes get it."""
    return inline(jax.make_jaxpr(fn)(*arguments), device_order(8))


def after(simplified_by: Pass, fn: Callable, *arguments: Any) -> str:
    """The text of a program after one pass, whose values stay what they were."""
    before = flat(fn, *arguments)
    found = simplified_by(before)
    values = [
        np.asarray(jnp.arange(v.aval.size).reshape(v.aval.shape) + 1).astype(v.aval.dtype)
        for v in before.jaxpr.invars
    ]
    wanted = jaxpr_as_fun(before)(*values)
    for a, b in zip(jax.jit(jaxpr_as_fun(found))(*values), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    return program_text(found.jaxpr)


def primitives(fn: Callable, *arguments: Any) -> list[str]:
    """The names of all primitives of a flat program."""
    return [eqn.primitive.name for eqn in walk(flat(fn, *arguments).jaxpr)]


def dedent(text: str) -> str:
    """A program as it is written in a test."""
    lines = text.strip("\n").split("\n")
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[margin:].rstrip() for line in lines).rstrip()
