"""`gshard.jit`: annotate -> trace -> propagate -> partition -> run, on one screen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jax.sharding import AbstractMesh, AxisType, Mesh

from gshard import explain
from gshard.devices import Place
from gshard.meshes import axis_names
from gshard.moving.costs import MEMORY_LIMIT
from gshard.partition import Partitioner
from gshard.ports import Port, ports
from gshard.propagate import propagate
from gshard.sharding import Sharding
from gshard.signature import Call, Signature
from gshard.trace import trace


def jit(
    fn: Callable,
    *,
    devices: Sequence[jax.Device] | int | None = None,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    partitioner: str = "gshard",
    memory_limit: int = MEMORY_LIMIT,
    strict: bool = False,
) -> Jitted:
    """Like `jax.jit`, for a function whose tensors are annotated with `split` and the like.

    `devices` are the devices to run on (default: all), or their number: a count of abstract
    devices, for which `lower` works without hardware. `partitioner="xla"` keeps the annotations
    and leaves the partitioning to XLA. An operand that would take more than `memory_limit` bytes
    when gathered is passed around in a loop instead. A primitive without a rule runs whole on
    every device (`Lowered.collectives` says so); with `strict` it is an error.
    """
    if partitioner not in ("gshard", "xla"):
        raise ValueError(f"partitioner is {partitioner!r}; allowed are 'gshard' and 'xla'")
    if isinstance(devices, int) and devices < 1:
        raise ValueError(f"devices is {devices}; at least 1 device is needed")
    return Jitted(
        fn,
        devices,
        Signature(fn, static_argnums, donate_argnums),
        partitioner,
        memory_limit,
        strict,
    )


class Jitted:
    """A function to be partitioned: call it, or `lower` it to see what that would do."""

    def __init__(
        self,
        fn,
        devices,
        signature: Signature,
        partitioner: str,
        memory_limit: int,
        strict: bool,
    ):
        self.signature = signature
        self.partitioner = partitioner
        self.memory_limit = memory_limit
        self.strict = strict
        self._devices = devices
        self._lowered: dict[Any, Any] = {}
        functools.update_wrapper(self, fn)

    @property
    def devices(self) -> Sequence[jax.Device] | int:
        """The devices, or how many abstract ones."""
        return jax.devices() if self._devices is None else self._devices

    def lower(self, *args, **kwargs) -> Lowered:
        """Partition for arguments like these: arrays, or `jax.ShapeDtypeStruct`s."""
        return self._lower(self.signature.bind(args, kwargs))

    def __call__(self, *args, **kwargs) -> Any:
        """Partition if need be, and run."""
        call = self.signature.bind(args, kwargs)
        lowered = self._lower(call)
        return lowered.compile().run(call)

    def _lower(self, call: Call) -> Lowered:
        if call.key not in self._lowered:
            if self.partitioner == "xla":
                from gshard.xla import lower_with_xla

                self._lowered[call.key] = lower_with_xla(self.signature, call, self.devices)
            else:
                self._lowered[call.key] = lower(
                    self.signature, call, self.devices, self.memory_limit, self.strict
                )
        return self._lowered[call.key]


def lower(
    signature: Signature, call: Call, devices, memory_limit: int, strict: bool = False
) -> Lowered:
    """The whole way, for one call."""
    count = devices if isinstance(devices, int) else len(devices)
    flat_fn, results = signature.flat(call)
    program = trace(flat_fn, call.avals, count)  # one flat program, logical shapes
    shardings = propagate(program, count)  # a sharding for every value

    jaxpr = program.jaxpr
    inputs = [shardings[v] for v in (*jaxpr.constvars, *jaxpr.invars)]
    outputs = [
        Sharding.replicated(v.aval.ndim, count) if isinstance(v, Literal) else shardings[v]
        for v in jaxpr.outvars
    ]
    if any(s.manual for s in outputs):
        raise ValueError(
            "the function returns a value of a manual region; leave it with "
            "manual_to_auto_spmd_partition, which says which part of the result each device has"
        )
    shapes = [tuple(v.aval.shape) for v in (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)]
    axes, crossing = ports([*inputs, *outputs], shapes, count)
    into, out_of = crossing[: len(inputs)], crossing[len(inputs) :]

    def local(*arrays):  # the per-device program
        place = Place(axis_names(axes), count)
        partitioner = Partitioner(place, shardings, memory_limit, strict)
        tiles = [p.enter(a) for p, a in zip(into, arrays, strict=True)]
        results = partitioner.run(jaxpr, tiles)
        return [p.leave(t) for p, t in zip(out_of, results, strict=True)]

    if isinstance(devices, int):
        # Abstract axes may be explicit by default: then avals would have to carry their shardings.
        mesh: Any = AbstractMesh(axes, axis_names(axes), (AxisType.Auto,) * len(axes))
    else:
        mesh = Mesh(np.asarray(devices).reshape(axes), axis_names(axes))
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(p.spec for p in into),
        out_specs=[p.spec for p in out_of],
        check_vma=False,
    )
    donated = tuple(len(jaxpr.constvars) + i for i in call.donated)
    avals = [
        jax.ShapeDtypeStruct(
            p.physical_shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)
        )
        for p, v in zip(into, (*jaxpr.constvars, *jaxpr.invars), strict=True)
    ]
    placed = {} if isinstance(devices, int) else {"in_shardings": [p.named(mesh) for p in into]}
    jitted = jax.jit(sharded, donate_argnums=donated, keep_unused=True, **placed)
    traced = jitted.trace(*avals)  # XLA compiles and runs it
    return Lowered(traced, mesh, into, out_of, program.consts, call, results)


class Lowered:
    """A partitioned program, before it is compiled."""

    def __init__(self, traced, mesh, into: list[Port], out_of: list[Port], consts, call, results):
        self._traced = traced
        self._mesh = mesh
        self._into = into
        self._out_of = out_of
        self._consts = consts
        self._call = call
        self._results = results
        self._compiled: Compiled | None = None

    @property
    def jaxpr(self) -> Jaxpr:
        """The per-device program."""
        (eqn,) = [e for e in self._traced.jaxpr.eqns if e.primitive.name == "shard_map"]
        inner = eqn.params["jaxpr"]
        return getattr(inner, "jaxpr", inner)

    @functools.cached_property
    def collectives(self) -> list[explain.Collective]:
        """What moves, how much, and because of which line."""
        return explain.collectives_of(self.jaxpr, self._mesh.size)

    @property
    def num_equations(self) -> int:
        """The size of the per-device program."""
        return explain.count_equations(self.jaxpr)

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments, in a tree like theirs."""
        shardings = [p.sharding for p in self._into[len(self._consts) :]]
        return self._call.unflatten_arguments(shardings)

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results, in a tree like theirs."""
        return self._results.unflatten([p.sharding for p in self._out_of])

    @property
    def in_info(self) -> Any:
        """The arguments as shapes with JAX's own shardings: how to load them from a checkpoint."""
        ports = self._into[len(self._consts) :]
        avals = self._call.avals
        structs = [p.struct(self._mesh, a.dtype) for p, a in zip(ports, avals, strict=True)]
        return self._call.unflatten_arguments(structs)

    def as_text(self) -> str:
        """The per-device program, readable."""
        return explain.program_text(self.jaxpr, self._mesh.size)

    def compile(self) -> Compiled:
        """The program, compiled by XLA for its devices."""
        if isinstance(self._mesh, AbstractMesh):
            raise RuntimeError(
                f"this program was lowered for {self._mesh.size} abstract devices and cannot run; "
                "give gshard.jit a list of devices (devices=jax.devices()) to compile or call it"
            )
        if self._compiled is None:
            self._compiled = Compiled(self)
        return self._compiled


class Compiled:
    """An executable program: call it with arguments like those it was lowered for."""

    def __init__(self, lowered: Lowered):
        self._lowered = lowered
        self._executable = lowered._traced.lower().compile()
        self._consts = [
            p.put(lowered._mesh, c) for p, c in zip(lowered._into, lowered._consts, strict=False)
        ]

    def __call__(self, *args, **kwargs) -> Any:
        """Run it."""
        return self.run(self._lowered._call.signature.bind(args, kwargs))

    def run(self, call: Call) -> Any:
        """Place the arguments, execute, wrap the results."""
        low = self._lowered
        out = self._executable(*self._consts, *self._put(call))
        return low._results.unflatten(
            [p.get(low._mesh, x) for p, x in zip(low._out_of, out, strict=True)]
        )

    def place(self, *args, **kwargs) -> Any:
        """The arguments where the program wants them: a call with these moves nothing."""
        low = self._lowered
        call = low._call.signature.bind(args, kwargs)
        ports = low._into[len(self._consts) :]
        placed = [p.get(low._mesh, x) for p, x in zip(ports, self._put(call), strict=True)]
        return call.unflatten_arguments(placed)

    def _put(self, call: Call) -> list[jax.Array]:
        into = self._lowered._into[len(self._consts) :]
        return [p.put(self._lowered._mesh, x) for p, x in zip(into, call.leaves, strict=True)]

    def as_text(self) -> str:
        """XLA's optimised program."""
        return self._executable.as_text()

    def cost_analysis(self) -> Any:
        """XLA's own estimate of the work on one device."""
        return self._executable.cost_analysis()

    def memory_analysis(self) -> Any:
        """XLA's account of the memory on one device."""
        return self._executable.memory_analysis()
