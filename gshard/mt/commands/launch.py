"""`gshard launch`: a training as several processes on this machine, watched and started again."""

from __future__ import annotations

from typing import Annotated

import typer

# What stands behind the command's name is for that command, options too.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def launch(
    command: Annotated[list[str], typer.Argument(help="what to run: train ...")],
    processes: Annotated[
        int, typer.Option("-n", "--processes", help="how many processes", min=1)
    ] = 2,
    least: Annotated[
        int, typer.Option(help="go on with as few, if one does not come back [all]", min=0)
    ] = 0,
    failures: Annotated[
        int, typer.Option(help="give up after so many without a new step in between", min=1)
    ] = 3,
) -> None:
    """Run several processes on this machine, and start them again when one dies or hangs."""
    from gshard.mt.commands.show import console
    from gshard.mt.errors import UserError
    from gshard.mt.launch.local import ThisMachine, gshard_command
    from gshard.mt.launch.supervisor import Patience, Supervisor

    if command[0] != "train":
        raise UserError(f"`gshard launch` runs `train`, and not {command[0]!r}")

    def note(text: str) -> None:
        console.print(f"launch: {text}", markup=False, soft_wrap=True)

    patience = Patience(failures=failures)
    train = gshard_command(command)
    raise typer.Exit(Supervisor(ThisMachine(), train, processes, note, patience, least).run())
