"""A mark before every collective, by which a process keeps where it is (`gshard.recording`).

A mark is a call of the host. It depends on the operand of its collective and on the result of the
collective before it, and the collective depends on the mark: collectives run one after the other in
the order of the program, and the last mark is that of the collective that a device waits at. An
element of the operand passes through a selection that always takes it: no bit of it changes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import mlir

from gshard import _jax, recording
from gshard.graph import bodies, map_bodies
from gshard.graph.evaluate import equations_of
from gshard.graph.regions import walk
from gshard.moving.inventory import Collective, collectives_in, collectives_of
from gshard.planning.emission import host_call

Sizes = tuple[tuple[str, int], ...]  # of the axes of the mesh

# Operands: device, program, number, and elements of the arrays that it depends on. Its result is
# the number.
mark_p = Primitive("mark")
_TARGET, _WORDS = "gshard_mark", 3
_NO_COLLECTIVE = 2**32 - 1  # the number before a loop, which enters no collective by itself


@mark_p.def_abstract_eval
def _mark_aval(device: Any, program: Any, number: Any, *after: Any) -> ShapedArray:
    return ShapedArray((), np.dtype(np.uint32))


def _entered(words: Sequence[int]) -> None:
    device, program, number = words
    if number != _NO_COLLECTIVE:
        recording.enter(device, program, number)


def _callback(ctx: Any, *operands: Any) -> Any:
    """The mark where there are no host calls: on GPUs."""

    def called(*words: np.ndarray) -> tuple[np.ndarray]:
        _entered([int(word) for word in words[:_WORDS]])
        return (np.asarray(words[_WORDS - 1]),)

    results, _, _ = mlir.emit_python_callback(
        ctx, called, None, operands, ctx.avals_in, ctx.avals_out,
        has_side_effect=True, returns_token=False,
    )  # fmt: skip
    return results


host_call.register(_TARGET, _entered, _WORDS)
_host_call = jax.ffi.ffi_lowering(
    _TARGET, has_side_effect=True, operand_output_aliases={_WORDS - 1: 0}
)
mlir.register_lowering(mark_p, _callback, cacheable=False)
mlir.register_lowering(mark_p, _host_call, platform="cpu")


def recorded(jaxpr: Jaxpr, sizes: Sizes, name: str, recorder: recording.Recorder) -> Jaxpr:
    """A per-device program, on a mesh with axes of these sizes, with a mark at every collective."""
    count = int(np.prod([size for _, size in sizes]))
    table = [_told(c) for c in collectives_of(jaxpr, count)]
    if not table:
        return jaxpr
    key = recorder.program(name, table)
    return _Marking(sizes, key).program(jaxpr)


def run_id() -> str:
    """A name that the processes of one run share, and that no other run has."""
    mine, client, key = os.urandom(6).hex(), _jax.processes.client, "gshard/run"
    if client is None:
        return mine
    try:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            client.key_value_set(key, mine)
        return str(client.blocking_key_value_get(key, 60_000))
    except jax.errors.JaxRuntimeError:  # the others are gone: it is recorded as a run by itself
        return mine


def _told(collective: Collective) -> dict[str, Any]:
    return {"kind": collective.kind, "bytes": collective.bytes, "source": collective.source}


class _Marking:
    """Writes a program with its marks; numbers are those of `Lowered.collectives`."""

    def __init__(self, sizes: Sizes, key: int):
        self._sizes, self._key = sizes, key
        self._numbers = itertools.count()
        self._devices = int(np.prod([size for _, size in sizes]))

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """A program or body; marks in it come one after the other."""
        eqns: list[JaxprEqn] = []
        before: list[Any] = []  # what the next mark depends on
        for eqn in jaxpr.eqns:
            moved = [next(self._numbers) for _ in collectives_in(eqn, self._devices, 1)]
            if moved or _has_collectives(eqn):
                number = moved[0] if moved else _NO_COLLECTIVE
                eqns += self._marked(eqn, number, before)
                eqns[-1] = map_bodies(eqns[-1], self._body)
                before = list(filter(_can_be_gated, eqn.outvars)) or before
            else:
                eqns.append(eqn)
        return jaxpr.replace(eqns=eqns)

    def _body(self, body: ClosedJaxpr) -> ClosedJaxpr:
        return body.replace(jaxpr=self.program(body.jaxpr))

    def _marked(self, eqn: JaxprEqn, number: int, before: Sequence[Any]) -> list[JaxprEqn]:
        """The equation behind a mark, through which one of its operands passes."""
        gated = next((a for a in eqn.invars if _can_be_gated(a)), None)
        if gated is None:
            return [eqn]
        here = np.uint32(number)

        def run(*values: jax.Array) -> jax.Array:
            device = lax.axis_index(tuple(name for name, _ in self._sizes))
            words = lax.convert_element_type(device, np.uint32), np.uint32(self._key), here
            done = mark_p.bind(*words, *map(_first_element, values))
            return _only_if(done == here, values[-1])

        marks, (passed,) = equations_of(run, [*before, gated], like=eqn, axes=self._sizes)
        return [*marks, eqn.replace(invars=[passed if a is gated else a for a in eqn.invars])]


def _only_if(marked: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, whose first element depends on the mark, which has always been made.

    One element is enough to keep the compiler from running the collective earlier, and it is
    written in place: a selection of all elements would copy every array that is sent.
    """
    first = lax.slice(x, [0] * x.ndim, [1] * x.ndim)
    kept = lax.select(jnp.broadcast_to(marked, first.shape), first, lax.full_like(first, 0))
    return lax.dynamic_update_slice(x, kept, [0] * x.ndim)


def _first_element(x: jax.Array) -> jax.Array:
    element = lax.reshape(lax.slice(x, [0] * x.ndim, [1] * x.ndim), ())
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        element = lax.real(element)
    return lax.convert_element_type(element, jnp.int32)


def _can_be_gated(atom: Any) -> bool:
    if isinstance(atom, Literal) or not hasattr(atom.aval, "shape"):
        return False
    return bool(atom.aval.size) and not jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)


def _has_collectives(eqn: JaxprEqn) -> bool:
    inner = (e for body in bodies(eqn) for e in walk(body))
    return any(True for e in inner for _ in collectives_in(e, 2, 1))
