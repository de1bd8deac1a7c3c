"""A run that trains in seconds, for all tests that need one."""

import dataclasses

from gshard.mt.batching.batches import BatchConfig
from gshard.mt.batching.tokenizer import VocabularyConfig
from gshard.mt.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from gshard.nn.gating import GatingConfig
from gshard.nn.transformer import TransformerConfig

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


class Notes:
    """A display that remembers what it was told."""

    def __init__(self):
        self.stages, self.notes, self.records = [], [], []

    def stage(self, name, total):
        self.stages.append(name)
        return lambda note: None

    def note(self, text):
        self.notes.append(text)

    def update(self, record, steps, seconds_left):
        self.records.append(record)
