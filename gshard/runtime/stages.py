"""`Lowered` and `Compiled`: a partitioned program to inspect, and to run.

Both partitioners implement one protocol, `Partitioned`: these classes serve them both.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.extend.core import Jaxpr

from gshard import _jax
from gshard.capture.calls import Trees
from gshard.checking.audit import check_program
from gshard.checking.report import Report
from gshard.explanation import Explanation
from gshard.forecast import Forecast, Hardware, forecast
from gshard.forecast.collective import Topology
from gshard.forecast.report import GENERIC, counted, size
from gshard.forecast.time import timed
from gshard.moving import inventory as explain
from gshard.moving.costs import MACHINE
from gshard.planning.plan import Plan
from gshard.replaying.replay import Replay, Until
from gshard.runtime.partitioned import Partitioned
from gshard.runtime.stage import Stage
from gshard.tensors.sharding import Sharding


class Lowered(Stage):
    """A partitioned program, before it is compiled."""

    def __init__(self, program: Partitioned, trees: Trees, hardware: Hardware | None = None):
        self._program = program
        self.trees = trees
        self._planned_for = hardware
        self._compiled: Compiled | None = None

    def __repr__(self) -> str:
        what = f"{self._program.traced.fun_name} for {_devices(self._program)}"
        if not self._program.per_device:
            return f"<gshard.Lowered of {what}, to be partitioned by XLA>"
        return (
            f"<gshard.Lowered of {what}: {counted(self.num_equations, 'equation')}, "
            f"{counted(len(self.collectives), 'collective')}, "
            f"{size(sum(c.total_bytes for c in self.collectives))} sent by each device>"
        )

    @property
    def jaxpr(self) -> Jaxpr:
        """The per-device program."""
        return self._program.jaxpr

    @property
    def num_equations(self) -> int:
        """The number of equations of the program."""
        return explain.count_equations(self.jaxpr)

    @functools.cached_property
    def collectives(self) -> explain.Collectives:
        """The collectives, each with its bytes, its reason and the line that causes it.

        On hardware that overlaps communication also with the products that hide it.
        """
        hardware = self._planned_for
        beside: dict[Any, tuple[str, ...]] = {}
        if self._program.per_device and hardware is not None and hardware.overlaps:
            topology = hardware.topology(self._program.num_devices)
            operators = timed(self.jaxpr, hardware, topology)
            beside = {t.value: t.overlapped_with for t in operators if t.overlapped_with}
        return explain.Collectives(self._program.collectives(beside))

    @property
    def conflicts(self) -> tuple[Any, ...]:
        """Conflicting splits of the same tensors: which one was taken, and what the others cost."""
        return self._program.conflicts

    @property
    def plan(self) -> Plan:
        """The per-device program before emission: every reshard, reduction and halo is a node."""
        self._check_per_device()
        return self._program.plan

    def dump(self, folder: str | Path) -> list[Path]:
        """Write the program after every stage and pass into `folder`: one readable file each.

        Lines that a stage added or changed begin with `>`.
        """
        self._check_per_device()
        return self._program.history.dump(folder)

    def replay(self, *args: Any, device: int = 0, until: Until = None, **kwargs: Any) -> Replay:
        """What one `device` runs, equation by equation, in Python: iterate over the steps.

        All devices run along, on the host, one equation at a time; no hardware is needed. The
        steps end at the end of the program, or after the one that `until` asks for: at a source
        line ("model.py:12"), at the first step on any device that makes a NaN or an infinity
        ("nan"), or at the first for which a function of a step is true.
        """
        self._check_per_device()
        arrays = self.arrays(args, kwargs)
        return Replay(self._program.emitted, arrays, device, until, self.trees.like_results)

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """Whether every value of the program is what its operator gives unpartitioned.

        The program is replayed on these arguments, on the host. See `gshard.check`.
        """
        self._check_per_device()
        return check_program(self._program.emitted, self.arrays(args, kwargs))

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments, as a tree of the same structure."""
        return self.trees.like_arguments(self._program.input_shardings())

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results, as a tree of the same structure."""
        return self.trees.like_results(self._program.output_shardings())

    @property
    def flat_shardings(self) -> tuple[Sequence[Sharding], Sequence[Sharding]]:
        """The shardings of the arrays among the arguments and results, in their order."""
        return self._program.input_shardings(), self._program.output_shardings()

    @property
    def in_info(self) -> Any:
        """The arguments as shapes with JAX's own shardings: how to load them from a checkpoint."""
        return self.trees.like_arguments(self._program.structs(self.trees.dtypes))

    def fits(self, given: Sequence[Sharding | None]) -> bool:
        """Whether arguments with these shardings need no resharding."""
        return self._program.fits(given)

    def as_text(self, dialect: str | None = None) -> str:
        """The program in readable form, or in a `dialect` of JAX such as "stablehlo"."""
        if dialect is not None:
            return self._program.traced.lower().as_text(dialect)
        return self._program.text()

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The program in the compiler's input representation."""
        return self._program.traced.lower().compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """XLA's cost estimate before its optimisations."""
        return self._program.traced.lower().cost_analysis()

    def forecast(
        self, hardware: str | Path | Hardware | None = None, topology: Topology | None = None
    ) -> Forecast:
        """Forecast time and memory on some hardware, which this machine need not have.

        The default is the hardware that `gshard.jit` planned for: its keyword `hardware`, or what
        JAX reports. For any other, the forecast notes that the plan was made for another one.
        """
        self._check_per_device()
        closed_over = len(self.jaxpr.invars) - len(self.trees.dtypes)
        donated = [closed_over + i for i in self.trees.donated]
        if hardware is None:
            hardware = self._planned_for
        made = forecast(self.jaxpr, self._program.num_devices, hardware, topology, donated)
        return replace(made, planned_for=self._other_plan(made.hardware))

    def _other_plan(self, hardware: Hardware) -> str:
        """The hardware that the program was planned for, if that is not `hardware`."""
        planned = self._planned_for
        if hardware.machine == (planned.machine if planned else MACHINE):
            return ""
        return planned.name if planned else GENERIC

    def explain(
        self,
        hardware: str | Path | Hardware | None = None,
        *,
        seconds: float | None = None,
    ) -> Explanation:
        """What is sent, how long it takes, because of which line, and which annotation to change.

        To find the last, changes of one annotation at a time are tried for up to `seconds`: by
        default 10, or 0 for a large program, since each takes as long as a lowering.
        """
        self._check_per_device()
        default = hardware is None and self._planned_for is None
        program = self._program
        return Explanation(
            program.subject,
            self._forecast_alone(hardware),
            program.traced.fun_name,
            seconds,
            is_default=default,
        )

    def page(
        self,
        hardware: str | Path | Hardware | None = None,
        growth: Mapping[int, Forecast] | None = None,
    ) -> str:
        """The explanation as one HTML file that needs nothing else; needs the extra `cli`.

        `growth` has forecasts of the same step for other numbers of devices, to be plotted.
        """
        return self.explain(hardware).page(growth)

    def _forecast_alone(self, hardware: str | Path | Hardware | None) -> Forecast:
        """The forecast without the constant that is fitted to complete training steps."""
        made = self.forecast(hardware)
        reached = replace(made.hardware.reached, step_seconds=0.0)
        return replace(made, hardware=replace(made.hardware, reached=reached))

    def _repr_html_(self) -> str:
        """What it sends, takes and holds, in five lines, and its page: for notebooks."""
        if not self._program.per_device:
            return f"<code>{html.escape(repr(self))}</code>"
        return self.explain(seconds=0).summary_html()

    def _check_per_device(self) -> None:
        if not self._program.per_device:
            raise ValueError(
                "partitioner='xla' leaves the partitioning to XLA's compiler, so there is no "
                "per-device program to inspect; omit the keyword to use gshard's own partitioner"
            )

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """The program, compiled by XLA for its devices."""
        if compiler_options:
            return Compiled(self._program, self.trees, compiler_options)
        if self._compiled is None:
            self._compiled = Compiled(self._program, self.trees)
        return self._compiled

    def logical(self) -> jax.stages.Traced:
        """The program as JAX's own stage, from logical arguments to logical results."""

        def called(*args: Any, **kwargs: Any) -> Any:
            arrays = [x for x in jax.tree.leaves((args, kwargs)) if _jax.is_array_like(x)]
            return self.trees.like_results(self._program.logical(arrays))

        called.__name__ = called.__qualname__ = self._program.traced.fun_name
        args, kwargs = jax.tree.unflatten(
            self.trees.in_tree, self._program.structs(self.trees.dtypes)
        )
        with _jax.without_mesh():
            return jax.jit(called).trace(*args, **kwargs)


class Compiled(Stage):
    """An executable program: call it with arguments like those it was lowered for."""

    def __init__(
        self, program: Partitioned, trees: Trees, compiler_options: dict[str, Any] | None = None
    ):
        self._program = program
        self.trees = trees
        self._stage = program.compile(compiler_options)
        self._consts = program.placed_consts()
        self._crossing = _jax.quick_call_of_compiled(self._cross)
        self._quick = _jax.quick_call_of_compiled(self._cache_miss)

    def __repr__(self) -> str:
        name = self._program.traced.fun_name
        return f"<gshard.Compiled of {name} for {_devices(self._program)}>"

    @_jax.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if not self._program.wraps:
            return self._quick(*args, **kwargs)
        if self._program.wraps_arguments:
            args, kwargs = tuple(self._program.put(self.arrays(args, kwargs))), {}
        return self.trees.like_results(self._program.get(self._crossing(*args, **kwargs)))

    def _cache_miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        results, quick = self.run(self.arrays(args, kwargs))
        return self.trees.like_results(results), quick, False

    def run(self, leaves: Sequence[Any]) -> tuple[list[Any], Any]:
        """Place the flat arguments, execute, wrap the results; also returns JAX's fast-path data.

        The fast path passes arrays on unchanged. There is one only if nothing is wrapped, and it
        applies to the arguments' present shardings: for others, JAX calls this again.
        """
        placed = self._program.put(leaves)
        results = self._program.get(_jax.execute(self._stage, [*self._consts, *placed]))
        if self._program.wraps:
            return results, None
        return results, self._quick_way(leaves, placed, self.trees.out_tree, results)

    def _cross(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """The outputs before unwrapping, and the fast path to them."""
        crossing = self._program.wraps_arguments  # the arguments have been placed
        leaves = list(args) if crossing else self.arrays(args, kwargs)
        placed = leaves if crossing else self._program.put(leaves)
        out = _jax.execute(self._stage, [*self._consts, *placed])
        return out, self._quick_way(leaves, placed, jax.tree.structure(out), out), False

    def _quick_way(
        self, leaves: Sequence[Any], placed: Sequence[Any], tree: Any, results: Sequence[Any]
    ) -> Any:
        """JAX's fast-path data for arguments like these; None if the fast path cannot be used.

        It cannot if an array on several devices had to be moved: the fast path would pass it to the
        executable without checking its sharding. JAX places all other arguments itself.
        """
        pairs = list(zip(leaves, placed, strict=True))
        if any(x is not a and _on_several_devices(x) for x, a in pairs):
            return None
        names = [x.sharding if x is a else None for x, a in pairs]
        return _jax.quick_data(self._stage, tree, names, self._consts, results)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments under the program's shardings: a call with these moves nothing."""
        placed = self._program.put(self.arrays(args, kwargs))
        return self.trees.like_arguments(self._program.shown(placed))

    @property
    def input_shardings(self) -> Any:
        """JAX's shardings of the arguments: positional ones, and a dict of the keyword ones."""
        structs = self._program.structs(self.trees.dtypes)
        return jax.tree.unflatten(self.trees.in_tree, [s.sharding for s in structs])

    @property
    def output_shardings(self) -> Any:
        """JAX's shardings of the results; one that does not divide is given as replicated."""
        return self.trees.like_results(self._program.named_results())

    @property
    def input_formats(self) -> Any:
        """JAX's formats of the arguments: shardings and memory layouts."""
        crossing = _flat_formats(self._stage.input_formats)[len(self._consts) :]
        structs = self._program.structs(self.trees.dtypes)
        formats = [_format(c, s.ndim, s.sharding) for c, s in zip(crossing, structs, strict=True)]
        return jax.tree.unflatten(self.trees.in_tree, formats)

    @property
    def output_formats(self) -> Any:
        """JAX's formats of the results."""
        crossing = _flat_formats(self._stage.output_formats)
        ranks = [info.ndim for info in jax.tree.leaves(self.trees.out_info)]
        formats = map(_format, crossing, ranks, self._program.named_results())
        return self.trees.like_results(list(formats))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, as `jax.stages.Compiled.call` does, which takes `_params` first."""
        first = 1 if args and args[0] is self._params else 0
        return self(*args[first:], **kwargs)

    def runtime_executable(self) -> Any:
        """The executable of XLA's runtime."""
        return self._stage.runtime_executable()

    def as_text(self) -> str | None:
        """XLA's optimised program."""
        return self._stage.as_text()

    def cost_analysis(self) -> Any:
        """XLA's own estimate of the work on one device."""
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any:
        """XLA's memory analysis for one device."""
        return self._stage.memory_analysis()

    # Read by `jax.experimental.serialize_executable`. Programs whose arguments or results are
    # wrapped, or that close over arrays, would lose their wrapping.
    @property
    def _executable(self) -> Any:
        if self._consts or self._program.wraps:
            raise ValueError(
                "a program that closes over arrays, or has arguments or results that do not "
                "divide by their tiles or are on devices in an irregular order, cannot be "
                "serialized: pass the arrays as arguments, and choose sizes that divide; "
                "jax.export serializes it without the compiled code"
            )
        return self._stage._executable

    @property
    def _params(self) -> Any:
        return self._stage._params

    _no_kwargs = False


def _on_several_devices(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.sharding.num_devices > 1


def _devices(program: Partitioned) -> str:
    return counted(program.num_devices, "device")


def _flat_formats(tree: Any) -> list[Format]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Format))


def _format(crossing: Format, rank: int, sharding: Any) -> Format:
    """The format of an array that the user sees; a wrapped one has the default layout."""
    layout = crossing.layout
    as_it_is = layout is not None and len(layout.major_to_minor) == rank
    return Format(layout if as_it_is else None, sharding)
