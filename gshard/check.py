"""`gshard.check` and `gshard.prove`: whether the partitioned program is the same program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from gshard import _jax
from gshard.checking.report import Report
from gshard.jit import Jitted, jit
from gshard.runtime.options import JitKeywords
from gshard.runtime.stages import Lowered


@_jax.api_boundary
def check(fun: Callable[..., Any], /, *args: Any, **keywords: Unpack[JitKeywords]) -> Report:
    """Run `fun` partitioned and unpartitioned, equation by equation, and compare every value.

    `fun` is a function, which is partitioned with these keywords of `gshard.jit`, or one that
    `gshard.jit` returned. `devices=8` is enough: both programs run on the host, on numbers for
    which addition is associative, and have to be equal exactly (`Report.exact`): no tolerance.
    The arguments decide branches, routing and comparisons. Values that only exist in one of the
    programs are counted in `Report.not_compared`.
    """
    return _found(Lowered.check, fun, args, keywords)


@_jax.api_boundary
def prove(fun: Callable[..., Any], /, *shapes: Any, **keywords: Unpack[JitKeywords]) -> Report:
    """Prove, from shapes alone, that the program for all devices computes what `fun` does.

    As `gshard.check`, at random arguments of these shapes (`jax.ShapeDtypeStruct`s, or arrays), for
    the mesh that the program will run on: `devices=2048` needs no hardware. Sizes are made as small
    as the same plan allows, even ones stay even and uneven ones uneven; `Report.sizes` has them.
    Integers are those of arrays among `shapes` where sizes stay, and small random ones otherwise.
    """
    return _found(Lowered.prove, fun, shapes, keywords)


def _found(find: Callable[..., Report], fun: Any, args: tuple[Any, ...], keywords: Any) -> Report:
    """What `find`, a method of a lowering, says of `fun` and those arguments that are arrays."""
    if isinstance(fun, Jitted) and keywords:
        raise TypeError(
            f"gshard.{find.__name__} was given a function of gshard.jit and the keywords "
            f"{', '.join(keywords)}; give them to gshard.jit, or the function without it"
        )
    jitted = fun if isinstance(fun, Jitted) else jit(fun, **keywords)
    return find(jitted.lower(*args), *jitted.static_leaves(args, {})[1])
