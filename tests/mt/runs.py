"""Runs for all tests that need one: one that trains in seconds, and one with random weights."""

import dataclasses
from collections import Counter

import jax
import numpy as np

from gshard.mt.batching.batches import BatchConfig
from gshard.mt.batching.tokenizer import VocabularyConfig
from gshard.mt.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from gshard.mt.run import Run
from gshard.mt.training.checkpoint import Checkpoints
from gshard.mt.training.loading import load_model
from gshard.nn.config import GatingConfig
from gshard.nn.transformer import TransformerConfig
from tests.nn import models

MODEL = TransformerConfig(
    source_vocab=0,
    target_vocab=0,
    encoder_layers=2,
    decoder_layers=2,
    model_dim=16,
    hidden_dim=32,
    heads=2,
    key_dim=8,
    value_dim=8,
    experts=8,
    groups=8,
    gating=GatingConfig(min_capacity=4),
)


def run_config(corpus, **train):
    """The smallest run worth the name: 8 experts, dropout and random routing included."""
    return RunConfig(
        model=MODEL,
        name="test",
        data=DataConfig(corpus=str(corpus.folder)),
        vocabulary=VocabularyConfig(500, 450),
        batch=BatchConfig(8, 64, 48),
        optimizer=OptimizerConfig(learning_rate=0.5, warmup=10, rise=3),
        train=TrainConfig(
            **{"steps": 12, "save_every": 4, "log_every": 1, "dev_batches": 2, **train}
        ),
    )


def with_train(config, **train):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def with_devices(config, **devices):
    return dataclasses.replace(config, devices=dataclasses.replace(config.devices, **devices))


def losses(run, kind="train"):
    return {r["step"]: r["nll"] for r in run.metrics() if r["kind"] == kind}


def weights(run, which="last"):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_model(run, which)[0])]


def copied(run, folder, **train_settings):
    """A new run that shares the vocabulary, so that only the training is repeated."""
    config = with_train(run.config, **train_settings)
    data = dataclasses.replace(config.data, vocabulary=str(run.folder / "vocabulary"))
    return Run.create(folder, dataclasses.replace(config, data=data))


SCARCE = GatingConfig(eval_capacity_factor=0.5)  # whoever drops tokens gives other results


def random_model(tokenizer, **changes):
    sizes = {"source_vocab": tokenizer.source_size, "target_vocab": tokenizer.target_size}
    return models.model(models.config(**{"gating": SCARCE, "experts": 8, **sizes, **changes}))


def make_run(folder, tokenizer, corpus="corpus", length=16):
    """A run with two checkpoints of random weights: enough to translate into nonsense."""
    dims = dataclasses.replace(models.TINY, experts=8)
    batch = BatchConfig(source_length=length, target_length=length)
    data = DataConfig(corpus=str(corpus))
    run = Run.create(folder, RunConfig(dims, vocabulary=tokenizer.config, batch=batch, data=data))
    tokenizer.save(folder / "vocabulary")
    checkpoints = Checkpoints(folder)
    for step, seed in ((5, 0), (10, 1)):
        model = models.model(run.model_config, seed)
        checkpoints.save(step, model, {"count": np.zeros(3)}, {}, dev_nll=3.0 + step)
    checkpoints.close()
    return run


class Notes:
    """A progress display that remembers what it was told."""

    def __init__(self):
        self.stages, self.notes, self.records, self.done = [], [], [], Counter()

    def stage(self, name, total):
        self.stages.append((name, total))

        def step(note="", count=1):
            self.done[name] += count

        return step

    def note(self, text):
        self.notes.append(text)

    def update(self, record, steps, seconds_left):
        self.records.append(record)
