"""`gshard auto`: a mesh and annotations for a function, chosen by gshard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gshard.commands.functions import arguments_of, imported, one_line_errors
from gshard.commands.options import Arguments, Hardware, Json, Plots, Shapes
from gshard.commands.show import working
from gshard.errors import UserError
from gshard.untrusted import printable_lines


class _Phases(logging.Handler):
    """Says which phase the search has begun, while it is entered."""

    def __init__(self, tell: Callable[[str], None]):
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the search."""
        self._tell(record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger("gshard.auto").addHandler(self)
        logging.getLogger("gshard.auto").setLevel(logging.INFO)

    def __exit__(self, *raised: object) -> None:
        logging.getLogger("gshard.auto").removeHandler(self)


def auto(
    function: Annotated[str, typer.Argument(help="module:function")],
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: Annotated[int, typer.Option(help="number of devices", min=1)] = 8,
    hardware: Hardware = None,
    memory: Annotated[
        str | None,
        typer.Option(help="bytes on each device, as in '16 GB'", show_default="the hardware's"),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--budget", help="seconds of search; more until a layout fits", min=0.0),
    ] = 60.0,
    explain: Annotated[
        bool, typer.Option("--explain", help="show what else was considered, and which limits bind")
    ] = False,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option(help="a file for the layout")] = None,
    plots: Plots = None,
) -> None:
    """Choose a mesh and annotations for a function; no accelerator needed."""
    from gshard.autosharding.layout.annotations import as_text
    from gshard.comparing.step import Step

    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out is {out}; there is no folder {out.parent}")
    with one_line_errors():
        given = arguments_of(shapes, arguments)
        step = Step(imported(function), given)
        with working() as tell, _Phases(tell):
            tell(f"choosing annotations for {devices} devices, about {seconds:.0f} seconds")
            keywords = {"devices": devices, "hardware": hardware, "memory": memory}
            layout = step.by_auto(**keywords, seconds=seconds)
    if out is not None:
        layout.save(out)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        typer.echo(str(layout.plot_frontier(plots / "frontier.svg")), err=True)
    if as_json:
        print(as_text(layout), end="")
    else:
        print(printable_lines(layout.explain() if explain else str(layout)))
