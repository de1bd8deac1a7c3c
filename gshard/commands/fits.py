"""`gshard fits`: whether a training step fits in memory, with which batch, and what would help."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from gshard.commands.functions import arguments_of, imported, one_line_errors, use_virtual_devices
from gshard.commands.options import Arguments, Json, Shapes
from gshard.commands.show import working
from gshard.untrusted import printable_lines

_DOES_NOT_FIT = 3  # the exit status; 1 and 2 are mistakes


def fits(
    step: Annotated[str, typer.Argument(help="module:function, with or without jax.jit")],
    shapes: Shapes = None,
    arguments: Arguments = None,
    on: Annotated[str, typer.Option(help="number and kind of devices, as in 8xh100")] = "8xh100",
    batch: Annotated[
        list[int] | None,
        typer.Option(help="positions of the arguments with a batch dim", show_default="last"),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--budget", help="seconds of gshard.auto; 0 skips it", min=0.0)
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Say whether a training step fits in memory; exit status 0 if it does, 3 if not."""
    import json

    from gshard.comparing.fits import fits
    from gshard.comparing.step import Step
    from gshard.forecast import hardware

    with one_line_errors():
        asked = re.fullmatch(r"(\d+)\s*x\s*(\S+)", on)
        if asked is None:
            raise ValueError(f"--on is {on!r}; write number and kind of devices, as in 8xh100")
        machine = hardware(asked[2])
        use_virtual_devices(int(asked[1]))
        given = Step(imported(step), arguments_of(shapes, arguments))
        with working() as tell:
            found = fits(given, machine, batch, seconds, tell)
    print(json.dumps(found.as_dict(), indent=1) if as_json else printable_lines(str(found)))
    if not found.fits:
        raise typer.Exit(_DOES_NOT_FIT)
