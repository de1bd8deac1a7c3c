"""`gshard serve`: a local web page to try a model."""

from __future__ import annotations

from typing import Annotated

import typer

from gshard.commands.options import Alpha, Beam, Checkpoint, Devices, Rows, Run


def serve(
    run: Run,
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes any free one")] = 8000,
    beam: Beam = 4,
    alternatives: Annotated[int, typer.Option(help="translations to show")] = 4,
    alpha: Alpha = 0.6,
    checkpoint: Checkpoint = "best",
    rows: Rows = 32,
    devices: Devices = 0,
) -> None:
    """Show a page on this machine: type a sentence, see its translation and its experts."""
    import os
    import sys

    from gshard.commands.show import console
    from gshard.mt.decoding.serve import Server
    from gshard.mt.decoding.service import Service
    from gshard.mt.decoding.translator import TranslateConfig, open_translator
    from gshard.mt.run import Run as OpenedRun

    opened = OpenedRun.open(run)
    longest = max(opened.config.batch.source_length, 16)
    config = TranslateConfig(beam, min(alternatives, beam), alpha, rows, longest)
    with console.status(f"loading {opened.name}"):
        translator, step = open_translator(opened, checkpoint, config, devices)
    service = Service(translator, opened.name, step)
    server = Server(service, port)
    service.warm_up()
    console.print(f"{opened.name} is at {server.address} (Ctrl-C ends it)", soft_wrap=True)
    try:
        server.run()
    except KeyboardInterrupt:
        console.print("ended")
    # A thread may be compiling, which cannot be interrupted and would crash during a normal exit;
    # there is nothing left to save.
    sys.stdout.flush()
    os._exit(0)
