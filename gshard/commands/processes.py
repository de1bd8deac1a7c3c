"""Which process of how many this is: options that several commands share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gshard.mt.launch.environment import Hosts

Coordinator = Annotated[str, typer.Option(help="HOST:PORT of process 0, on every host")]
Processes = Annotated[
    int | None, typer.Option(help="number of processes", show_default="from the environment, or 1")
]
Process = Annotated[
    int | None,
    typer.Option(help="number of this process, from 0", show_default="from the environment, or 0"),
]


def members(coordinator: str, processes: int | None, process: int | None) -> Hosts:
    """This command's processes, from the command line, else from the environment."""
    from gshard.mt.launch.environment import Hosts, find

    if processes == 1:  # a single process needs no coordinator
        return Hosts(coordinator, 1, process or 0).checked()
    if coordinator and processes is not None and process is not None:
        return Hosts(coordinator, processes, process).checked()
    found = find(os.environ)
    return Hosts(
        coordinator or found.coordinator,
        found.count if processes is None else processes,
        found.index if process is None else process,
        found.launcher,
    ).checked()
