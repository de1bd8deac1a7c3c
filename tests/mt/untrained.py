"""A run with a checkpoint of random weights: enough to translate into nonsense."""

import dataclasses

import numpy as np

from gshard.mt.batching.batches import BatchConfig
from gshard.mt.config import RunConfig
from gshard.mt.run import Run
from gshard.mt.training.checkpoint import Checkpoints
from gshard.nn import GatingConfig
from tests.nn import models

SCARCE = GatingConfig(eval_capacity_factor=0.5)  # whoever drops tokens gives other results


def random_model(tokenizer, **changes):
    sizes = {"source_vocab": tokenizer.source_size, "target_vocab": tokenizer.target_size}
    return models.model(models.config(**{"gating": SCARCE, "experts": 8, **sizes, **changes}))


def make_run(folder, tokenizer):
    dims = dataclasses.replace(models.TINY, experts=8)
    batch = BatchConfig(source_length=16, target_length=16)
    run = Run.create(folder, RunConfig(dims, vocabulary=tokenizer.config, batch=batch))
    tokenizer.save(folder / "vocabulary")
    checkpoints = Checkpoints(folder)
    for step, seed in ((5, 0), (10, 1)):
        model = models.model(run.model_config, seed)
        checkpoints.save(step, model, {"count": np.zeros(3)}, {}, dev_nll=3.0 + step)
    checkpoints.close()
    return run
