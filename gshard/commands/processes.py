"""Which process of how many this is: options that several commands share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gshard.mt.launch.environment import Hosts

Coordinator = Annotated[str, typer.Option(help="HOST:PORT of process 0, on every host")]
Processes = Annotated[
    int | None, typer.Option(help="how many processes work together [found, or 1]")
]
Process = Annotated[int | None, typer.Option(help="which of them this is, from 0 [found, or 0]")]


def members(coordinator: str, processes: int | None, process: int | None) -> Hosts:
    """What the environment says of this command's processes, unless the command line does."""
    from gshard.mt.launch.environment import Hosts, find

    if processes == 1:  # who works alone need not know of others
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
