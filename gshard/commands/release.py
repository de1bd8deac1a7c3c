"""`gshard release` and `gshard import`: models as folders for others, and those of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gshard.commands.options import Checkpoint, Run
from gshard.commands.show import say
from gshard.errors import UserError, one_of

_LAYOUTS = ("gshard", "huggingface", "ctranslate2")


def release(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="the new folder of the release")] = None,
    checkpoint: Checkpoint = "best",
    to: Annotated[
        str, typer.Option(help="gshard, or another tool's layout: huggingface, ctranslate2")
    ] = "gshard",
    precision: Annotated[str, typer.Option(help="bfloat16, float32, or int8")] = "bfloat16",
    verify: Annotated[
        bool, typer.Option("--verify", help="RUN is a release: verify its checksums")
    ] = False,
) -> None:
    """Export a run for translation: weights, vocabularies, settings and a model card."""
    from gshard.graph.readable import size
    from gshard.mt import hosts
    from gshard.mt.release import exported, make
    from gshard.mt.run import Run as OpenedRun

    chosen = one_of("precision", precision, make.PRECISIONS)
    if (out is None) != verify:
        raise UserError(
            "give either --out NEW_FOLDER, to make a release, or --verify, to check one"
        )
    one_of("layout", to, _LAYOUTS)
    hosts.start(1)
    if out is None:
        weights = make.verify(OpenedRun.open(run))
        say(f"{run}: {weights:,} weights, and every file matches its checksum")
        return
    opened = OpenedRun.open(run)
    if to == "huggingface":
        made = exported.export(opened, out, checkpoint)
    elif to == "ctranslate2":
        made = exported.to_ctranslate2(opened, out, checkpoint)
    else:
        made = make.make_release(opened, out, checkpoint, chosen)
    for path in sorted(made.rglob("*")):
        if path.is_file():
            held = size(path.stat().st_size)
            say(f"{held:>8}  {path}")


def import_(
    folder: Annotated[Path, typer.Argument(help="local folder of an NllbMoe or M2M100 model")],
    out: Annotated[Path, typer.Option(help="the new folder of the model")],
) -> None:
    """Read a checkpoint of Hugging Face's NllbMoe or M2M100 as a gshard model with equal logits."""
    from gshard.mt import hosts
    from gshard.mt.release.imported import import_model
    from gshard.mt.run import CONFIG
    from gshard.mt.training.weights import count_of

    hosts.start(1)
    model = import_model(folder, out)
    c = model.config
    use = f"`gshard translate {out}` translates with it"
    if not (out / CONFIG).is_file():
        use = "in Python: gshard.mt.release.imported.load_import (it has no tokenizer)"
    layers = f"{c.encoder_layers} + {c.decoder_layers} layers"
    say(f"{out}: {count_of(model):,} weights, {layers}, {c.experts} experts; {use}")
