"""`gshard compare`: XLA's program of a training step and gshard's, and which is worth it."""

from __future__ import annotations

from typing import Annotated

import typer

from gshard.commands.functions import arguments_of, imported, one_line_errors, use_virtual_devices
from gshard.commands.options import Arguments, HardwareOfPaper, Json, Page, Shapes
from gshard.commands.show import working
from gshard.untrusted import printable_lines


def compare(
    step: Annotated[str, typer.Argument(help="module:function, with or without jax.jit")],
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: Annotated[int, typer.Option(help="number of devices", min=1)] = 8,
    hardware: HardwareOfPaper = "h100",
    seconds: Annotated[
        float, typer.Option("--budget", help="seconds of gshard.auto; 0 skips it", min=0.0)
    ] = 30.0,
    as_json: Json = False,
    page: Page = None,
) -> None:
    """Compare what XLA and gshard make of a training step; no accelerator needed."""
    import json

    from gshard.comparing.comparison import compare
    from gshard.comparing.step import Step

    with one_line_errors():
        use_virtual_devices(devices)
        given = Step(imported(step), arguments_of(shapes, arguments))
        with working() as tell:
            found = compare(given, hardware, seconds, tell)
    print(json.dumps(found.as_dict(), indent=1) if as_json else printable_lines(str(found)))
    if page is not None:
        page.write_text(found.page(), encoding="utf-8")
