"""`gshard import`: a checkpoint of Hugging Face as a gshard model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    folder: Annotated[Path, typer.Argument(help="local folder of an NllbMoe or M2M100 model")],
    out: Annotated[Path, typer.Option(help="the new folder of the model")],
) -> None:
    """Read a checkpoint of Hugging Face's NllbMoe or M2M100 as a gshard model with equal logits."""
    import jax

    from gshard.commands.show import console
    from gshard.mt import hosts
    from gshard.mt.release.imported import import_model
    from gshard.mt.run import CONFIG

    hosts.start(1)
    model = import_model(folder, out)
    count = sum(leaf.size for leaf in jax.tree.leaves(model))
    c = model.config
    use = f"`gshard translate {out}` translates with it"
    if not (out / CONFIG).is_file():
        use = "in Python: gshard.mt.release.imported.load_import (it has no tokenizer)"
    console.print(
        f"{out}: {count:,} weights, {c.encoder_layers} + {c.decoder_layers} layers, {c.experts} "
        f"experts; {use}",
        soft_wrap=True,
    )
