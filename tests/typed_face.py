"""What a type checker makes of gshard's public face; `make lint` checks this file with mypy.

`assert_type` fails where a type is wider or narrower than it says, so that a decorator that loses
the signature of a function, or an annotation that returns Any, is an error here.
"""

from collections.abc import Callable
from typing import assert_type

import jax

import gshard
from gshard import manual


def layer(x: jax.Array, scale: float = 1.0) -> tuple[jax.Array, int]:
    x = assert_type(gshard.split(x, 0, 8), jax.Array)
    x = assert_type(gshard.shard(x, [[0], [1]]), jax.Array)
    x = assert_type(gshard.replicate(x), jax.Array)
    local = assert_type(gshard.auto_to_manual_spmd_partition(x), jax.Array)
    local = assert_type(manual.all_reduce(local), jax.Array)
    assert_type(gshard.partition_id(), jax.Array)
    x = assert_type(gshard.manual_to_auto_spmd_partition(local, [[0], [1]]), jax.Array)
    return x * scale, 1


jitted = gshard.jit(layer, devices=8, hardware="h100")


@gshard.jit
def plain(x: jax.Array) -> jax.Array:
    return x


@gshard.jit(static_argnames="times", donate_argnums=0)
def with_keywords(x: jax.Array, times: int) -> jax.Array:
    return x * times


class Model:
    @gshard.jit
    def method(self, x: jax.Array) -> jax.Array:
        return x


def uses(x: jax.Array) -> None:
    assert_type(jitted(x, scale=2.0), tuple[jax.Array, int])
    assert_type(plain, gshard.Jitted[[jax.Array], jax.Array])  # type: ignore[assert-type]  # names
    assert_type(plain(x), jax.Array)
    assert_type(with_keywords(x, times=2), jax.Array)
    assert_type(Model().method(x), jax.Array)
    called: Callable[[jax.Array], jax.Array] = plain
    called(x)
    lowered = assert_type(jitted.lower(x), gshard.Lowered)
    assert_type(lowered.compile(), gshard.Compiled)


def mistakes(x: jax.Array) -> None:
    """Each of these is refused: mypy reports a comment here that ignores nothing."""
    plain(x, x)  # type: ignore[call-arg]
    jitted(x, scale="much")  # type: ignore[arg-type]
    gshard.jit(layer, device_count=8)  # type: ignore[call-overload]
    Model().method()  # type: ignore[call-arg]
