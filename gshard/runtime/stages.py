"""`Lowered`: a partitioned program, to inspect and to compile.

This class and `Compiled` serve both kinds of program: gshard's own, and those of XLA's partitioner.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr

from gshard import _jax
from gshard.capture.calls import Trees
from gshard.checking.audit import at_random, at_values, check_program, check_results
from gshard.checking.replay import Replay, Until
from gshard.checking.report import Report
from gshard.checking.smaller import Resized, reduced, tiles_by_size
from gshard.explanation import Explanation
from gshard.explanation.hlo import HloProgram
from gshard.explanation.profiled import Profile, profile
from gshard.forecast import Forecast, Hardware, forecast
from gshard.forecast.collective import Topology
from gshard.forecast.program import body_of
from gshard.forecast.report import GENERIC
from gshard.forecast.time import timed
from gshard.graph.readable import counted, size
from gshard.graph.regions import walk
from gshard.moving import inventory
from gshard.moving.costs import GENERIC_COSTS
from gshard.pipelining.meaning import Pipe, pipeline_p
from gshard.pipelining.schedules import Schedule
from gshard.planning.plan import Plan
from gshard.runtime.compiled import Compiled, Stage
from gshard.runtime.program import Program
from gshard.runtime.xla import Partitioned
from gshard.tensors.sharding import Sharding

_SMALL = 2**12  # elements of arguments whose sizes are not reduced for a proof


class Lowered(Stage):
    """A partitioned program, before it is compiled."""

    def __init__(self, program: Partitioned, trees: Trees, hardware: Hardware | None = None):
        self._program = program
        self.trees = trees
        self._planned_for = hardware
        self._compiled: list[Compiled] = []  # once, for copies of this too
        self.resized: Resized | None = None

    def named(self, names: Sequence[str]) -> Lowered:
        """Itself, with these names of the arrays among the arguments, where they are given."""
        if isinstance(self._program, Program) and any(names):
            self._program = self._program.named(names)
        return self

    def __repr__(self) -> str:
        if not isinstance(self._program, Program):
            return f"<gshard.Lowered of {self._name()}, to be partitioned by XLA>"
        return (
            f"<gshard.Lowered of {self._name()}: {counted(self.num_equations, 'equation')}, "
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
        return inventory.count_equations(self.jaxpr)

    @functools.cached_property
    def collectives(self) -> inventory.Collectives:
        """The collectives, each with its bytes, its reason and the line that causes it.

        On hardware that overlaps communication also with the products that hide it.
        """
        hardware = self._planned_for
        overlaps: dict[Any, tuple[str, ...]] = {}
        if isinstance(self._program, Program) and hardware is not None and hardware.overlaps:
            topology = hardware.topology(self._program.num_devices)
            body = body_of(self._program.finished, hardware.compiler)
            operators = timed(body, hardware, topology)
            overlaps = {t.value: t.overlapped_with for t in operators if t.overlapped_with}
        return inventory.Collectives(self._program.collectives(overlaps))

    @property
    def conflicts(self) -> tuple[Any, ...]:
        """Conflicting splits of the same tensors: which one was taken, and what the others cost."""
        return self._program.conflicts

    @property
    def plan(self) -> Plan:
        """The per-device program before emission: every reshard, reduction and halo is a node."""
        return self._own().plan

    @property
    def pipelines(self) -> list[Schedule]:
        """The schedules of the program's pipelines: `table`, `bubble`, `in_flight`; print them."""
        return [pipe.schedule for pipe in self._pipes]

    @property
    def _pipes(self) -> list[Pipe]:
        eqns = walk(self._own().captured.flat.jaxpr)
        return [eqn.params["pipe"] for eqn in eqns if eqn.primitive is pipeline_p]

    def dump(self, folder: str | Path) -> list[Path]:
        """Write the program after every stage and pass into `folder`: one readable file each.

        Lines that a stage added or changed begin with `>`.
        """
        return self._own().history.dump(folder)

    def replay(self, *args: Any, device: int = 0, until: Until = None, **kwargs: Any) -> Replay:
        """What one `device` runs, equation by equation, in Python: iterate over the steps.

        All devices run along, on the host, one equation at a time; no hardware is needed. The
        steps end at the end of the program, or after the one that `until` asks for: at a source
        line ("model.py:12"), at the first step on any device that makes a NaN or an infinity
        ("nan"), or at the first for which a function of a step is true.
        """
        emitted, arrays = self._own().emitted, self.arrays(args, kwargs)
        return Replay(emitted, arrays, device, until, self.trees.like_results)

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """Whether every value of the program equals that of the unpartitioned one, exactly.

        Both run on the host; these arguments decide branches. Where XLA partitions the program, it
        is run, and its results are compared within rounding. See `gshard.check`.
        """
        arrays = self.arrays(args, kwargs)
        if not isinstance(self._program, Program):
            results, _ = self.compile().run(arrays)
            of, given = self._program, (*self._program.closed_over, *arrays)
            return check_results(of.name, of.flat, given, results, of.num_devices)
        emitted = self._own().emitted
        return check_program(emitted, at_values(emitted, arrays))

    def prove(self, *args: Any, **kwargs: Any) -> Report:
        """Whether every value equals that of the unpartitioned program, at random arguments.

        It runs on the host, for all devices in lockstep. Sizes are made as small as the same plan
        allows; `Report.sizes` has them. Integers are taken from arrays among the arguments given
        here, where sizes stay. See `gshard.prove`.
        """
        given = self.arrays(args, kwargs) if args or kwargs else []
        lowered, same_plan, sizes = self, True, dict[int, int]()
        if self.resized is not None and self._elements() > _SMALL:
            taken = sorted({n for shape, _ in self.trees.types for n in shape}, reverse=True)
            tiles = tiles_by_size(self._own().arranged.seen.held)
            lowered, sizes, same_plan = reduced(self.resized, self, taken, tiles)
        emitted = lowered._own().emitted
        report = check_program(emitted, at_random(emitted, given))
        return replace(report, sizes=sizes, same_plan=same_plan)

    def _elements(self) -> int:
        return sum(math.prod(shape) for shape, _ in self.trees.types)

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
        planned = self._own().finished
        closed_over = len(planned.invars) - len(self.trees.dtypes)
        donated = [closed_over + i for i in self.trees.donated]
        if hardware is None:
            hardware = self._planned_for
        made = forecast(planned, self._program.num_devices, hardware, topology, donated)
        planned_for = self._other_plan(made.hardware)
        return replace(made, planned_for=planned_for, pipelines=tuple(self._pipes))

    def _other_plan(self, hardware: Hardware) -> str:
        """The hardware that the program was planned for, if that is not `hardware`."""
        planned = self._planned_for
        if hardware.cost_model == (planned.cost_model if planned else GENERIC_COSTS):
            return ""
        return planned.name if planned else GENERIC

    def explain(
        self, hardware: str | Path | Hardware | None = None, *, seconds: float | None = None
    ) -> Explanation:
        """What is sent, how long it takes, because of which line, and which annotation to change.

        To find the last, changes of one annotation at a time are tried for up to `seconds`: by
        default 10, or 0 for a large program, since each takes as long as a lowering.
        """
        program = self._own()
        default = hardware is None and self._planned_for is None
        return Explanation(
            program.subject,
            self._forecast_alone(hardware),
            program.name,
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

    def measured(self, trace: str | Path, hardware: str | Path | Hardware | None = None) -> Profile:
        """A trace of `jax.profiler` with steps of this program, compared with its forecast.

        `trace` is the folder given to `jax.profiler.trace` while `self.compile()`, or the function
        of `gshard.jit`, ran on the devices. The result has times by line and by collective, and
        the hardware fitted to them: `Path("mine.toml").write_text(profile.hardware_toml())`.
        """
        program, text = self._own(), self.compile().as_text() or ""
        expected = self._forecast_alone(hardware)
        module = text.partition("HloModule ")[2].partition(",")[0]
        places = HloProgram(text, expected.devices).places()
        return profile(program.name, module, expected, places, trace)

    def _forecast_alone(self, hardware: str | Path | Hardware | None) -> Forecast:
        """The forecast without the constant that is fitted to complete training steps."""
        made = self.forecast(hardware)
        alone = replace(made.hardware.efficiency, step_seconds=0.0)
        return replace(made, hardware=replace(made.hardware, efficiency=alone))

    def _repr_html_(self) -> str:
        """What it sends, takes and holds, in five lines, and its page: for notebooks."""
        if not isinstance(self._program, Program):
            return f"<code>{html.escape(repr(self))}</code>"
        return self.explain(seconds=0).summary_html()

    def _own(self) -> Program:
        """The program, if gshard has partitioned it."""
        if isinstance(self._program, Program):
            return self._program
        raise ValueError(
            "partitioner='xla' leaves the partitioning to XLA's compiler, so there is no "
            "per-device program to inspect: `collectives` has what it sends, by line, `check` "
            "compares results, `gshard compare` has both; omit the keyword for gshard's partitioner"
        )

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """The program, compiled by XLA for its devices."""
        if compiler_options:
            return Compiled(self._program, self.trees, compiler_options)
        if not self._compiled:
            self._compiled.append(Compiled(self._program, self.trees))
        return self._compiled[0]

    def logical(self) -> jax.stages.Traced:
        """The program as JAX's own stage, from logical arguments to logical results.

        Only the user's own mesh is in its signature: one artifact has one mesh, and callers cannot
        know the names of gshard's. On explicit axes the results have the plan's shardings as types.
        """
        placed, results = self._program.on_user_mesh()
        run: Any = self._program.logical
        if results:
            run = jax.sharding.auto_axes(run, out_sharding=results)

        def called(*args: Any, **kwargs: Any) -> Any:
            arrays = [x for x in jax.tree.leaves((args, kwargs)) if _jax.is_array_like(x)]
            return self.trees.like_results(run(arrays))

        called.__name__ = called.__qualname__ = self._program.name
        structs = [
            s.update(sharding=sharding)
            for s, sharding in zip(self._program.structs(self.trees.dtypes), placed, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self.trees.in_tree, structs)
        with _jax.without_mesh():
            return jax.jit(called).trace(*args, **kwargs)
