"""`gshard launch`: run a command as several local processes, and restart them on failures."""

from __future__ import annotations

from typing import Annotated

import typer

from gshard.commands.options import Least

_COMMANDS = ("train", "translate", "evaluate")
# Everything after the command's name is passed to that command, options included.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def launch(
    command: Annotated[
        list[str], typer.Argument(help="train, translate or evaluate, with its arguments")
    ],
    processes: Annotated[
        int, typer.Option("-n", "--processes", help="how many processes", min=1, max=1024)
    ] = 2,
    least: Least = 0,
    failures: Annotated[
        int, typer.Option(help="give up after this many restarts without a new step", min=1)
    ] = 3,
) -> None:
    """Run several processes on this machine, and restart them when one dies or hangs."""
    from gshard.commands.show import screen
    from gshard.mt.errors import UserError, nearest
    from gshard.mt.launch.local import ThisMachine, gshard_command
    from gshard.mt.launch.supervisor import Supervisor, Timeouts, without_checkpoint

    what = command[0]
    if what not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        raise UserError(f"`gshard launch` runs {known}, not {what!r}{nearest(what, _COMMANDS)}")
    # Output that was written cannot be taken back, so these are not restarted.
    if what == "translate" and not any(word.split("=")[0] == "--out" for word in command):
        failures = 1
    # Standard output is reserved for translations.
    console = screen(stderr=what == "translate", hurried=True)

    def note(text: str) -> None:
        console.print(f"launch: {text}", markup=False, soft_wrap=True)

    begun = gshard_command(command)
    supervisor = Supervisor(
        ThisMachine(),
        begun,
        processes,
        note,
        Timeouts(failures=failures),
        least,
        without_checkpoint(begun) if what == "train" else begun,
    )
    raise typer.Exit(supervisor.run())
