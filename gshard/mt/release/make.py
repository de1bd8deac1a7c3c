"""A release from a run: what translating needs, and nothing that only training does.

It is a run's folder too: `gshard translate`, `serve` and `evaluate` take it as they take a run.
The weights are rounded to bfloat16, which halves the file, or to 8 bits, which halves it again; of
each file that translations depend on there is a checksum. How the model was computed in training
(kernels for one GPU, say) is left behind: a release runs anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from gshard.mt import atomic
from gshard.mt.config import DataConfig, DeviceConfig, RunConfig, to_json
from gshard.mt.decoding.detect import detector_of
from gshard.mt.errors import UserError
from gshard.mt.release.card import CARD, card, provenance
from gshard.mt.run import CONFIG, Run
from gshard.mt.training import checksums
from gshard.mt.training.loading import load_model
from gshard.mt.training.names import named
from gshard.mt.training.released import (
    DETECTOR,
    MADE,
    VOCABULARY,
    has_checksums,
    is_release,
    problem,
    unverifiable,
    verified_in,
)
from gshard.mt.training.weights import WEIGHTS, Quantized, quantize, summed_axes, write_weights
from gshard.nn.shapes import weight_shapes

Precision = Literal["bfloat16", "float32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float32", "int8")


def make_release(
    run: Run, out: Path, which: str = "best", precision: Precision = "bfloat16"
) -> Path:
    """Write the release of a run's checkpoint to the new folder `out`."""
    if out.exists():
        raise UserError(f"{out} exists already; a release goes to a new folder")
    model, step = load_model(run, which)
    arrays = {}
    for name, leaf in named(model).items():
        array = np.asarray(leaf)
        if not np.isfinite(array.astype(np.float32)).all():
            raise UserError(f"{run.folder}: {name} of step {step} holds values that are not finite")
        arrays[name] = _rounded(name, array, precision)
    with atomic.new_folder(out) as part:
        run.tokenizer.save(part / VOCABULARY)
        write_weights(part / WEIGHTS, arrays, {"step": str(step), "run": run.name})
        atomic.write_json(part / CONFIG, to_json(anywhere(run.config)))
        weights = sum(leaf.size for leaf in jax.tree.leaves(model))
        size = (part / WEIGHTS).stat().st_size
        text = card(run, step, weights, size, precision)
        (part / CARD).write_text(text, encoding="utf-8")
        if detector := detector_of(run):
            detector.save(part / DETECTOR)
        command = f"gshard release {run.name} --out {out.name} --checkpoint {step}"
        command += f" --precision {precision}"
        atomic.write_json(part / MADE, provenance(run, step, command))
        checksums.write(part, verified_in(part))
    return out


def _rounded(name: str, array: np.ndarray, precision: Precision) -> np.ndarray | Quantized:
    """A weight as it is written; what has no form in 8 bits is small and stays in float32."""
    if precision != "int8":
        return array.astype(precision)
    axes = summed_axes(name)
    return quantize(array, axes) if axes else array.astype("float32")


def verify(run: Run) -> int:
    """The number of weights of a release whose files are those that were released; else an error.

    An error too for a release of an earlier version, which has no checksums.
    """
    if not is_release(run):
        raise UserError(f"{run.folder} is not a release; `gshard release {run.folder} --out NEW`")
    if why := problem(run) or ("" if has_checksums(run) else unverifiable(run)):
        raise UserError(why)
    return sum(map(math.prod, weight_shapes(run.model_config).values()))


def anywhere(config: RunConfig) -> RunConfig:
    """The configuration without paths of this machine, and computed as any machine can."""
    model = dataclasses.replace(
        config.model,
        dtype="float32",
        weight_dtype="float32",
        attention="plain",
        dispatch="index",
        random="threefry",
        remat="none",
    )
    return dataclasses.replace(config, model=model, data=DataConfig(), devices=DeviceConfig())
