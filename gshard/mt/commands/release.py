"""`gshard release`: a run's weights as a folder for others, with a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def release(
    run: Annotated[Path, typer.Argument(help="folder of a training run")],
    out: Annotated[Path, typer.Option(help="the new folder of the release")],
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step")] = "best",
    precision: Annotated[str, typer.Option(help="bfloat16, or float32")] = "bfloat16",
) -> None:
    """Write what translating with a run needs: weights, vocabularies, settings and a card."""
    from gshard.mt import hosts
    from gshard.mt.commands.show import console
    from gshard.mt.errors import UserError, nearest
    from gshard.mt.release.make import PRECISIONS, make_release
    from gshard.mt.run import Run

    chosen = next((each for each in PRECISIONS if each == precision), None)
    if chosen is None:
        known = " and ".join(PRECISIONS)
        raise UserError(
            f"no precision {precision!r}{nearest(precision, PRECISIONS)}; there are {known}"
        )
    hosts.start(1)
    made = make_release(Run.open(run), out, checkpoint, chosen)
    for path in sorted(made.rglob("*")):
        if path.is_file():
            size = path.stat().st_size / 1e6
            console.print(f"{size:8.2f} MB  {path}", markup=False, soft_wrap=True, highlight=False)
