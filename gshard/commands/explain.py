"""`gshard explain`: what a partitioned function sends, why, and which annotation to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gshard.commands.functions import arguments_of, imported, one_line_errors
from gshard.commands.options import Arguments, Hardware, Json, Page, Shapes
from gshard.commands.show import working
from gshard.untrusted import printable_lines

if TYPE_CHECKING:
    from gshard.explanation import Explanation
    from gshard.runtime.stages import Lowered


def explain(
    function: Annotated[str, typer.Argument(help="module:function with annotations")],
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: Annotated[int, typer.Option(help="number of devices", min=1)] = 8,
    hardware: Hardware = None,
    as_json: Json = False,
    page: Page = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--budget",
            help="seconds to try other annotations",
            show_default="10; 0 if large",
            min=0.0,
        ),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="prove that all devices compute what the function does"),
    ] = False,
    dump: Annotated[
        Path | None, typer.Option(help="a folder for the program after every stage of lowering")
    ] = None,
) -> None:
    """Explain what a partitioned function sends, why, and which annotation to change."""
    import json
    from dataclasses import asdict

    import gshard

    with one_line_errors():
        given = arguments_of(shapes, arguments)
        jitted = gshard.jit(imported(function), devices=devices, hardware=hardware)
        with working() as tell:
            tell(f"partitioning {function} for {devices} devices")
            lowered = jitted.lower(*given)
        if prove:
            raise typer.Exit(_prove(lowered))
        explanation = lowered.explain(seconds=seconds)
        if as_json:
            sent = [{**asdict(c), "reason": c.reason} for c in lowered.collectives]
            print(json.dumps({**lowered.forecast().as_dict(), "collectives": sent}, indent=1))
        else:
            _show(explanation)
        if page is not None:
            page.write_text(explanation.page(), encoding="utf-8")
        if dump is not None:
            lowered.dump(dump)


def _prove(lowered: Lowered) -> int:
    """Print the proof, or what differs; the exit status."""
    with working() as tell:
        tell("running both programs in a finite field")
        report = lowered.prove()
    print(printable_lines(str(report)))
    return 0 if report.ok else 1


def _show(explanation: Explanation) -> None:
    """Bytes and lines at once; then the changes of annotations, with a bar while they are tried."""
    from rich.console import Console
    from rich.progress import Progress

    from gshard.explanation.text import fix_lines, text

    if explanation.is_default:
        name = explanation.forecast.hardware.name
        print(f"hardware: {name}, as JAX reports; --hardware plans and times for another")
    print(printable_lines("\n".join(text(explanation))), flush=True)
    if not explanation.lines:
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("trying other annotations", total=None)
        explanation.search(lambda done, total: bar.update(task, completed=done, total=total))
    print(printable_lines("\n".join(["", *fix_lines(explanation)])))
