"""`gshard.check`: whether the partitioned program is the same program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from gshard import _jax
from gshard.checking.report import Report
from gshard.jit import Jitted, jit
from gshard.runtime.options import JitKeywords


@_jax.api_boundary
def check(fun: Callable[..., Any], /, *args: Any, **keywords: Unpack[JitKeywords]) -> Report:
    """Run `fun` partitioned and unpartitioned, equation by equation, and compare every value.

    `fun` is a function, which is partitioned with these keywords of `gshard.jit`, or one that
    `gshard.jit` returned. `devices=8` is enough: both programs run on the host, on numbers for
    which addition is associative, and have to be equal exactly (`Report.exact`): no tolerance.
    The arguments decide branches, routing and comparisons. Values that only exist in one of the
    programs are counted in `Report.not_compared`.
    """
    if isinstance(fun, Jitted):
        if keywords:
            given = ", ".join(keywords)
            raise TypeError(
                f"gshard.check was given a function of gshard.jit and the keywords {given}; give "
                "them to gshard.jit, or give gshard.check the function itself"
            )
        jitted = fun
    else:
        jitted = jit(fun, **keywords)
    return jitted.lower(*args).check(*args)
