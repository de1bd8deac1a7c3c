"""A run's folder: its configuration, vocabularies, encoded text, checkpoints and metrics."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.atomic import LOCK
from gshard.mt.batching.tokenizer import Tokenizer, train_tokenizer
from gshard.mt.batching.tokens import TaskTokens, open_tokens
from gshard.mt.config import RunConfig, conflicts, read, settings, to_json
from gshard.mt.progress import Advance
from gshard.nn.config import TransformerConfig, weight_shapes

if TYPE_CHECKING:
    from gshard.mt.data.corpus import Corpus

CONFIG = "config.json"
METRICS = "metrics.jsonl"
ID = "id.json"  # what the run is told from all others by, also from those with equal settings


@dataclass(frozen=True)
class Run:
    """One training run on disk."""

    folder: Path
    config: RunConfig

    @staticmethod
    def open(folder: str | Path) -> Run:
        """The run in `folder`; an error that says what to do if there is none."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise UserError(f"no run in {folder} (`gshard train tiny --out {folder}` starts one)")
        return Run(folder, read(folder / CONFIG))

    @staticmethod
    def create(folder: str | Path, config: RunConfig) -> Run:
        """The run in `folder` with this configuration: a new one, or the one that is there.

        What the losses depend on may not differ from the one that is there.
        """
        folder = Path(folder)
        if (folder / CONFIG).is_file():
            # By what is logged, saved or not.
            done = max((int(record["step"]) for record in read_metrics(folder)), default=0)
            if different := conflicts(read(folder / CONFIG), config, done):
                lines = "\n  ".join(different)
                raise UserError(
                    f"{folder} has a run with other settings:\n  {lines}\n"
                    f"`gshard train {folder}` continues it; another --out starts a new one"
                )
        elif folder.is_dir() and any(not p.name.startswith(LOCK) for p in folder.iterdir()):
            raise UserError(f"{folder} is not empty and not a run; name a new folder for the run")
        new = not (folder / CONFIG).is_file()
        atomic.write_json(folder / CONFIG, to_json(config))
        if new:
            atomic.write_json(folder / ID, {"id": os.urandom(8).hex()})
        return Run(folder, config)

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.folder.resolve().name

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The corpus that it learns from."""
        from gshard.mt.data.corpus import Corpus  # PyArrow, which translation does without

        return Corpus.open(self.config.data.corpus)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Its vocabularies."""
        return Tokenizer.load(self.folder / "vocabulary")

    @functools.cached_property
    def model_config(self) -> TransformerConfig:
        """The model, with the sizes of the vocabularies.

        A reproducible run dispatches tokens by einsums: lookups are in a manual region.
        """
        model = self.config.model
        if self.config.reproducible:
            model = dataclasses.replace(model, dispatch="einsum")
        return dataclasses.replace(
            model, source_vocab=self.tokenizer.source_size, target_vocab=self.tokenizer.target_size
        )

    @functools.cached_property
    def settings(self) -> dict[str, object]:
        """Its settings by name."""
        return {name: value for name, value, _ in settings(self.config)}

    @property
    def of_model(self) -> dict[str, object]:
        """The settings of its model by name, and its vocabularies' checksum."""
        model = {name: value for name, value in self.settings.items() if name[:6] == "model."}
        return {**model, "vocabulary": self.tokenizer.digest}

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array of its model, by name."""
        return weight_shapes(self.model_config)

    def make_vocabulary(self) -> None:
        """Make its vocabularies, unless they are there."""
        if not (self.folder / "vocabulary").is_dir():
            make_vocabulary(self.config, self.folder / "vocabulary")

    def tokens(
        self, split: str = "train", step: Advance | None = None, verify: bool = False
    ) -> list[TaskTokens]:
        """The text of a split as tokens, encoded once."""
        folder = self.folder / "tokens"
        return open_tokens(self.corpus, self.tokenizer, folder, split, step=step, verify=verify)

    def dev_tokens(self, verify: bool = False) -> list[TaskTokens]:
        """The dev text as tokens; [] if there is none: the training loss has to do."""
        try:
            return self.tokens("dev", verify=verify)
        except UserError:
            return []

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged."""
        return read_metrics(self.folder)


def make_vocabulary(config: RunConfig, place: Path) -> None:
    """Train vocabularies, or take the finished ones that a configuration names."""
    from gshard.mt.data.corpus import Corpus

    if finished := config.data.vocabulary:
        Tokenizer.load(finished).save(place)
    else:
        train_tokenizer(Corpus.open(config.data.corpus), config.vocabulary).save(place)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run logged; lines that are no records, as a killed run's last one, are left out."""
    try:
        found = [record for _, record in atomic.read_records(folder / METRICS) if record]
    except FileNotFoundError:
        return []
    return [{"kind": "", **record} for record in found if isinstance(record.get("step"), int)]
