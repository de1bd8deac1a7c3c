"""`Partitioned`: what a partitioner makes of a traced function, its own program or XLA's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Jaxpr

from gshard.explanation import Subject
from gshard.graph.history import History
from gshard.moving import inventory as explain
from gshard.planning.plan import Plan
from gshard.replaying.emitted import Emitted
from gshard.tensors.sharding import Sharding


class Partitioned(Protocol):
    """What a partitioner makes of a traced function, for arguments in a flat list."""

    @property
    def traced(self) -> jax.stages.Traced:
        """The function that XLA compiles, of the executable's inputs."""

    @property
    def jaxpr(self) -> Jaxpr:
        """The program: per device, or before XLA partitions it."""

    @property
    def num_devices(self) -> int:
        """How many devices the program is for."""

    @property
    def per_device(self) -> bool:
        """Whether `jaxpr` is the per-device program, or one that XLA has yet to partition."""

    @property
    def subject(self) -> Subject:
        """What explanations are computed from, where there is a per-device program."""

    @property
    def conflicts(self) -> tuple[Any, ...]:
        """Conflicting splits of the same tensors, and how each conflict was decided."""

    @property
    def plan(self) -> Plan:
        """The plan, where there is a per-device program."""

    @property
    def history(self) -> History:
        """The program after every stage, where there is a per-device program."""

    @property
    def emitted(self) -> Emitted:
        """What is replayed, where there is a per-device program."""

    @property
    def wraps(self) -> bool:
        """Whether some arguments or results are passed in another form than the user sees."""

    @property
    def wraps_arguments(self) -> bool:
        """Whether some arguments do."""

    def fits(self, given: Sequence[Sharding | None]) -> bool:
        """Whether arguments with these shardings need no resharding."""

    def collectives(self, beside: explain.Beside) -> list[explain.Collective]:
        """The collectives, with their bytes, the line that causes each and what hides it."""

    def text(self) -> str:
        """The program, readable."""

    def input_shardings(self) -> list[Any]:
        """The shardings of the arguments."""

    def output_shardings(self) -> list[Any]:
        """The shardings of the results."""

    def named_results(self) -> list[Any]:
        """JAX's shardings of the results."""

    def structs(self, dtypes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arguments as shapes with JAX's own shardings."""

    def compile(self, compiler_options: dict[str, Any] | None) -> jax.stages.Compiled:
        """The executable, or an error where there is nothing to run it on."""

    def placed_consts(self) -> list[jax.Array]:
        """The values that the user's function closes over, where the executable wants them."""

    def put(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments as the executable's inputs; arrays already in place are not moved."""

    def shown(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arguments that the user would see for these inputs."""

    def get(self, out: Sequence[jax.Array]) -> list[jax.Array]:
        """The results that the user sees, of the executable's outputs."""

    def logical(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The program on logical values, to be traced."""
