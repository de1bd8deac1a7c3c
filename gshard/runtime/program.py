"""`Program`: a partitioned function with its ports, ready for XLA."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gshard import _jax, recording
from gshard.capture.stage import Captured
from gshard.checking.lockstep import Emitted
from gshard.explanation import Subject
from gshard.graph import bodies, map_bodies
from gshard.graph.evaluate import bind, evaluate
from gshard.graph.history import History
from gshard.moving import inventory
from gshard.planning.emission import emit
from gshard.planning.emission.record import recorded, run_id
from gshard.planning.plan import Plan
from gshard.runtime.ports import Arrangement, Port
from gshard.tensors.sharding import Sharding


class GlobalFunction:
    """A function of flat global arrays on the devices of a `mesh`, whose arguments have ports.

    The first of them are `consts`, which the user's function closes over.
    """

    mesh: Any
    into: Sequence[Port]
    out_of: Sequence[Port] = ()
    consts: Sequence[Any] = ()

    @property
    def num_devices(self) -> int:
        """How many devices the program is for."""
        return self.mesh.size

    @property
    def arguments(self) -> Sequence[Port]:
        """The ports of the user's arguments."""
        return self.into[len(self.consts) :]

    @functools.cached_property
    def wraps(self) -> bool:
        """Whether some arguments or results are passed in another form than the user sees."""
        return self.wraps_arguments or any(p.stacked for p in self.out_of)

    @functools.cached_property
    def wraps_arguments(self) -> bool:
        """Whether some arguments do."""
        return any(p.stacked for p in self.into)

    def fits(self, given: Sequence[Sharding | None]) -> bool:
        """Whether arguments with these shardings need no resharding."""
        pairs = zip(reversed(given), reversed(self.into), strict=False)
        return all(s is None or s == p.sharding for s, p in pairs)

    def input_shardings(self) -> list[Sharding]:
        """The shardings of the arguments."""
        return [p.sharding for p in self.arguments]

    def structs(self, dtypes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arguments as shapes with JAX's own shardings."""
        ports = zip(self.arguments, dtypes, strict=True)
        return [p.struct(self.mesh, dtype) for p, dtype in ports]

    def on_user_mesh(self) -> tuple[list[NamedSharding | None], list[NamedSharding]]:
        """The arguments' shardings and the results', all on the user's mesh, where there is one.

        A sharding that the mesh cannot express is given as replicated.
        """
        mesh = next((p.label.mesh for p in self.arguments if p.label is not None), None)
        if mesh is None:
            return [None] * len(self.arguments), []
        replicated = NamedSharding(mesh, PartitionSpec())
        arguments = [p.label or replicated for p in self.arguments]
        return [*arguments], [p.label or replicated for p in self.out_of]

    def placed_consts(self) -> list[jax.Array]:
        """The values that the user's function closes over, where the executable wants them."""
        return [p.put(self.mesh, c) for p, c in zip(self.into, self.consts, strict=False)]

    def put(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments as the executable's inputs; arrays already in place are not moved."""
        return [p.put(self.mesh, x) for p, x in zip(self.arguments, leaves, strict=True)]

    def shown(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arguments that the user would see for these inputs."""
        return [p.get(self.mesh, x) for p, x in zip(self.arguments, arrays, strict=True)]


@dataclass(frozen=True)
class Program(GlobalFunction):
    """One program for all devices, which gshard has partitioned.

    `consts` are the values that the user's function closes over; they are the first arguments.
    All that is asked about it is read from `finished`, the plan after the last pass. It is emitted
    when it is to be compiled, replayed or shown.
    """

    captured: Captured
    settings: XlaSettings
    arranged: Arrangement
    finished: Jaxpr
    passes: History
    planned: Callable[[ClosedJaxpr, History], Arrangement]  # of a variant of the flat program
    wide: bool  # whether 64-bit types were enabled when it was planned

    name = property(lambda self: self.captured.name)
    mesh = property(lambda self: self.arranged.mesh)
    consts = property(lambda self: self.arranged.consts)
    into = property(lambda self: self.arranged.into)
    out_of = property(lambda self: self.arranged.out_of)
    plan = property(lambda self: self.arranged.plan)

    def named(self, names: Sequence[str]) -> Program:
        """The same, with these names of its last arguments; "" keeps the one that there is."""
        before = self.captured.argument_names
        first = len(before) - len(names)
        own = (new or old for new, old in zip(names, before[first:], strict=True))
        changed = copy.copy(self)  # with what was made from it
        captured = replace(self.captured, argument_names=(*before[:first], *own))
        object.__setattr__(changed, "captured", captured)
        return changed

    @property
    def subject(self) -> Subject:
        """What explanations are computed from."""
        flat, found, names = self.arranged.flat, self.arranged.found, self.captured.argument_names

        def variant(changed: ClosedJaxpr) -> Plan:
            return self.planned(changed, History()).plan

        return Subject(flat, found, self.finished, self.num_devices, variant, names)

    @property
    def conflicts(self) -> tuple[Any, ...]:
        """Conflicting splits of the same tensors, and how each conflict was decided."""
        return self.arranged.found.conflicts

    @property
    def history(self) -> History:
        """The program after every stage and pass, emission included."""
        self.traced  # noqa: B018  (which adds the last one)
        return self.passes

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The function that XLA compiles: the plan, emitted."""
        mesh = self.mesh
        placed = [p.named(mesh) for p in self.into] if isinstance(mesh, Mesh) else None
        with _jax.without_mesh(), jax.enable_x64(self.wide):
            program = self._emitted()

            def called(*arrays: jax.Array) -> list[jax.Array]:
                return evaluate(program, arrays, _copied)

            results = [p.named(mesh) for p in self.out_of]
            structs, consts = self.arranged.structs, len(self.consts)
            return self.settings.trace(called, self.name, structs, placed, consts, results)

    def _emitted(self) -> ClosedJaxpr:
        """The emitted program as a function of global arrays."""
        mesh, mapped = self.mesh, self.arranged.mapped
        jaxpr, names = emit(self.finished, tuple(mesh.shape.items()))
        self.passes.renamed |= names
        self.passes.add("emit", jaxpr, inventory.collective_note)
        place = recording.folder(mesh.devices.flat[0].platform) if isinstance(mesh, Mesh) else None
        if place is not None:
            recorder = recording.recorder(place, jax.process_index(), run_id)
            jaxpr = recorded(jaxpr, tuple(mesh.shape.items()), self.name, recorder)
        eqns = [
            map_bodies(eqn, lambda closed: closed.replace(jaxpr=jaxpr))
            if eqn.primitive is _jax.shard_map_p
            else eqn
            for eqn in mapped.jaxpr.eqns
        ]
        return mapped.replace(jaxpr=mapped.jaxpr.replace(eqns=eqns))

    @property
    def jaxpr(self) -> Jaxpr:
        """The per-device program."""
        return bodies(self._mapped)[0]

    @property
    def _mapped(self) -> JaxprEqn:
        """The equation whose body is the per-device program."""
        (eqn,) = [e for e in self.traced.jaxpr.eqns if e.primitive is _jax.shard_map_p]
        return eqn

    @functools.cached_property
    def emitted(self) -> Emitted:
        """What is replayed: the program between its ports.

        Constants that emission made, which JAX passes before the arguments, are its own again.
        """
        values = dict(zip(self.traced.jaxpr.jaxpr.constvars, self.traced.jaxpr.consts, strict=True))
        made = [values[v] for v in self._mapped.invars if v in values]
        variables = self.jaxpr.invars
        body = self.jaxpr.replace(constvars=variables[: len(made)], invars=variables[len(made) :])
        return Emitted(
            self.name,
            ClosedJaxpr(body, made),
            dict(self.mesh.shape),
            [(p.sharding, p.shape) for p in self.into],
            [(p.sharding, p.shape) for p in self.out_of],
            self.consts,
            self.arranged.seen.after(self.passes.now),
            self.captured.original,
        )

    def collectives(self, overlaps: inventory.Overlaps) -> list[inventory.Collective]:
        """The collectives, with their bytes and lines."""
        return inventory.collectives_of(self.finished, self.mesh.size, overlaps)

    def text(self) -> str:
        """The per-device program, readable."""
        return inventory.program_text(self.jaxpr, self.mesh.size)

    def output_shardings(self) -> list[Sharding]:
        """The shardings of the results."""
        return [p.sharding for p in self.out_of]

    def named_results(self) -> list[Any]:
        """JAX's shardings of the results; one that does not divide is given as replicated."""
        return [p.struct(self.mesh, jnp.float32).sharding for p in self.out_of]

    def compile(self, compiler_options: dict[str, Any] | None) -> jax.stages.Compiled:
        """The executable, for real devices."""
        if isinstance(self.mesh, AbstractMesh):
            raise RuntimeError(
                f"this program was lowered for {self.mesh.size} abstract devices and cannot run; "
                "give gshard.jit a list of devices (devices=jax.devices()) to compile or call it"
            )
        return self.traced.lower().compile(compiler_options=compiler_options)

    def get(self, out: Sequence[jax.Array]) -> list[jax.Array]:
        """The results that the user sees, of the executable's outputs."""
        return [p.get(self.mesh, x) for p, x in zip(self.out_of, out, strict=True)]

    def logical(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The program on logical values: what does not divide is stacked inside."""
        values = (*self.consts, *arguments)
        stacks = [p.whole_in(jnp.asarray(x)) for p, x in zip(self.into, values, strict=True)]
        out = self.traced(*stacks)
        return [p.whole_out(x) for p, x in zip(self.out_of, out, strict=True)]


@dataclass(frozen=True)
class XlaSettings:
    """The keywords with which the program is passed to `jax.jit`."""

    donated: tuple[int, ...]
    keep_unused: bool
    compiler_options: tuple[tuple[str, Any], ...]
    in_layouts: tuple[Any, ...] = ()  # of the flat arguments; None: the default
    out_layouts: tuple[Any, ...] = ()

    def with_options(self, options: Mapping[str, Any]) -> XlaSettings:
        """The same with more options for the compiler."""
        return replace(self, compiler_options=(*self.compiler_options, *options.items()))

    def trace(
        self,
        called: Any,
        name: str,
        structs: Sequence[jax.ShapeDtypeStruct],
        placed: Sequence[NamedSharding] | None,
        consts: int = 0,
        results: Sequence[NamedSharding | None] = (),
    ) -> jax.stages.Traced:
        """A function of global arrays, traced under the name of the user's function.

        Its first arguments are so many `consts`; `placed` are the shardings of all, and `results`
        those of the results; None where XLA chooses it.
        """
        into = [None] * consts + [*self.in_layouts]
        formats = {} if placed is None else {"in_shardings": [*map(_format, into, placed)]}
        if placed is not None and any(self.out_layouts):
            formats["out_shardings"] = [*map(_format, self.out_layouts, results)]
        called.__name__ = called.__qualname__ = name
        jitted = jax.jit(
            called,
            donate_argnums=tuple(consts + i for i in self.donated),
            keep_unused=self.keep_unused,
            compiler_options=dict(self.compiler_options) or None,
            **formats,
        )
        with _jax.without_mesh():
            return jitted.trace(*structs)


def _format(layout: Any, sharding: NamedSharding | None) -> Any:
    return sharding if layout is None or sharding is None else Format(layout, sharding)


def _copied(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, copied into the program that is being traced."""
    results = _jax.copied(eqn, values)
    return bind(eqn, values) if results is None else results
