"""Measure a trained model on held-out text: the numbers of section 4, with their controls.

Four systems translate the same sentences: the model, one that copies the source, one that copies
the translation of the most similar training sentence, and, on request, the model before training.
Copying shows how much of a score is names, numbers and markup, or near duplicates of the training
text, which messages of programs have; fresh weights show that the test can fail.
"""

from __future__ import annotations

import hashlib
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import Task
from gshard.mt.data.corpus import Corpus
from gshard.mt.data.splits import fingerprint
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.evaluation import scores as scoring
from gshard.mt.evaluation import store as stored
from gshard.mt.progress import SILENT, Progress

if TYPE_CHECKING:
    from gshard.mt.run import Run
    from gshard.nn.transformer import Transformer

VERSION = 1
EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class EvaluateConfig:
    """What to measure and how to search."""

    split: str = "test"
    languages: tuple[str, ...] = ()  # all of the run's
    sentences: int = 0  # of each task, at most; 0 is all
    beam: int = 4
    alpha: float = 0.6
    checkpoint: str = "best"  # or "last", or a step
    untrained: bool = False  # measure fresh weights too
    examples: int = 3  # of each task, to read
    rows: int = 0  # sentences searched at a time; 0 is 32 on a CPU and 128 elsewhere
    longest: int = 0  # longest source sentence that is not truncated, in tokens; 0: a training row
    shortest: int = 16  # source tokens of the smallest program, of twice that the next, ...

    def __post_init__(self) -> None:
        TranslateConfig(self.beam, alpha=self.alpha)  # the search refuses the same, but only later
        if self.examples < 0:
            raise UserError(f"{self.examples} examples cannot be shown")


@dataclass(frozen=True)
class System:
    """A model that can be measured: what its translations are filed under, and how to get them.

    `translator` is called once, and only if there is something to translate. `loads` counts
    expert loads; it is None for systems without experts.
    """

    step: int
    digest: str  # equal only for equal weights and vocabularies
    weights: int
    translator: Callable[[], stored.AnyTranslator]
    loads: Callable[[Sequence[stored.HeldOut], Progress], Mapping[str, Any]] | None = None
    numbers: str = ""  # those that its weights were rounded to


def evaluate(
    run: Run,
    config: EvaluateConfig,
    open_system: Callable[[str], System],
    progress: Progress = SILENT,
    open_rounded: Callable[[System], System] | None = None,
) -> dict[str, Any]:
    """Measure the run and write `evaluation.json`; stored translations are used again.

    `open_rounded` makes the same system with its weights rounded, to measure that too.
    """
    began = time.monotonic()
    sets = sets_of(run, config)
    system = open_system(config.checkpoint)
    store, found = translations(run.folder, system, config, sets, progress)
    controls = {"untrained": open_system("untrained")} if config.untrained else {}
    if open_rounded:
        controls["rounded"] = open_rounded(system)
    others = {
        name: translations(run.folder, each, config, sets, progress, each.numbers or name)[1]
        for name, each in controls.items()
    }
    groups = scoring.resource_groups(run.corpus, run.tokenizer.config.languages)
    step = progress.stage("score", len(sets))
    measured: dict[str, dict[str, Any]] = {}
    for held in sets:
        name = str(held.task)
        outputs = {prefix: [s.text for s in texts[name]] for prefix, texts in others.items()}
        outputs["nearest"] = from_training(run.corpus, held.task, held.sources)
        scored = task_scores(held, found[name], outputs)
        measured[name] = {"group": groups[held.task.foreign], **scored}
        step(name)
    loads = loads_of(store.folder, system, sets, progress)
    result = results_of(run, config, measured, began) | {
        "checkpoint": system.step,
        "weights": system.weights,
        **({"rounded": controls["rounded"].numbers} if open_rounded else {}),
        "examples": [e for held in sets for e in examples(held, found, config.examples)],
        **({"experts": loads} if loads else {}),
    }
    atomic.write_json(run.folder / EVALUATION, result)
    return result


def sets_of(run: Run, config: EvaluateConfig) -> list[stored.HeldOut]:
    """The sentences to measure on."""
    tasks = stored.tasks_of(run.tokenizer, config.languages)
    return stored.held_out(run.corpus, tasks, config.split, config.sentences)


def results_of(
    run: Run, config: EvaluateConfig, measured: Mapping[str, Mapping[str, Any]], began: float
) -> dict[str, Any]:
    """What a file of results holds, whatever was measured: the scores, and how they were made."""
    return {
        "version": VERSION,
        "run": run.name,
        "split": config.split,
        "sentences_asked": config.sentences,
        "beam": config.beam,
        "alpha": config.alpha,
        "seconds": round(time.monotonic() - began, 1),
        "signatures": signatures(measured),
        "tasks": measured,
        "averages": scoring.averages(measured),
        "tests": scoring.by_test(measured),
    }


def task_scores(
    held: stored.HeldOut,
    found: Sequence[stored.Translation],
    others: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """The scores of one task, of copying its source and of other systems, and those by test."""
    target = held.task.target
    texts = [s.text for s in found]
    scores = scoring.score(texts, held.references, target)
    measured: dict[str, Any] = {
        "language": held.task.foreign,
        "target": target,
        "sentences": len(held),
        "train_pairs": held.train_pairs,
        **{name: value for name, value in asdict(scores).items() if value not in (None, "")},
    }
    if len(held) < scoring.FEW:
        measured["few"] = True
    measured |= _scored(held, {"copy": held.sources, **others}, range(len(held)))
    places: dict[str, list[int]] = {}
    for place, test in enumerate(held.tests):
        places.setdefault(test, []).append(place)
    outputs = {"": texts, **{name: others[name] for name in ("nearest",) if name in others}}
    measured["tests"] = {
        test: {
            "sentences": len(mine),
            **({"few": True} if len(mine) < scoring.FEW else {}),
            **_scored(held, outputs, mine),
        }
        for test, mine in places.items()
    }
    return measured


def _scored(
    held: stored.HeldOut, outputs: Mapping[str, Sequence[str]], places: Sequence[int]
) -> dict[str, float]:
    """The scores of some sentences by several systems, each under its name."""
    references = [held.references[place] for place in places]
    found: dict[str, float] = {}
    for name, texts in outputs.items():
        scores = scoring.score([texts[place] for place in places], references, held.task.target)
        prefix = f"{name}_" if name else ""
        found |= {f"{prefix}bleu": scores.bleu, f"{prefix}chrf": scores.chrf}
    return found


def signatures(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The signatures that most tasks have; a task with another tokenizer states its own."""
    found = {}
    for metric in ("bleu", "spbleu", "chrf"):
        key = f"{metric}_signature"
        if stated := [task[key] for task in tasks.values() if key in task]:
            found[metric] = max(dict.fromkeys(stated), key=stated.count)
    return found


def examples(
    held: stored.HeldOut, found: Mapping[str, Sequence[stored.Translation]], count: int
) -> list[dict[str, Any]]:
    """`count` sentences of a task to read: always the same ones, chosen by their hash."""
    ranked = sorted(range(len(held)), key=lambda i: (fingerprint(held.sources[i]), i))
    name = str(held.task)
    return [
        {
            "task": name,
            "source": held.sources[i],
            "reference": held.references[i],
            "translation": text,
            "score": round(score, 4) if math.isfinite(score) else None,
            "chrf": round(scoring.sentence_chrf(text, held.references[i]), 2),
        }
        for i, (text, score) in ((i, found[name][i]) for i in ranked[:count])
    ]


def search_of(run: Run, config: EvaluateConfig) -> TranslateConfig:
    """How the run and its baselines are searched; nothing longer than what they have seen."""
    import jax

    rows = config.rows or (32 if jax.default_backend() == "cpu" else 128)
    longest = config.longest or max(run.config.batch.source_length, 16)
    return TranslateConfig(config.beam, 1, config.alpha, rows, longest, shortest=config.shortest)


def digest_of(model: Transformer, tokenizer: str) -> str:
    """Names weights by a few of them, which is enough to tell one training from another.

    Bits, not sums: those would depend on the number of devices.
    """
    import numpy as np

    some = (model.decoder_norm.scale, model.encoder_norm.scale, model.target.table)
    digest = hashlib.sha256(tokenizer.encode())
    for array in some:
        everywhere = getattr(array, "is_fully_addressable", True)
        here = array if everywhere else array.addressable_data(0)
        few = here[:8] if here.ndim > 1 else here
        digest.update(np.ascontiguousarray(np.asarray(few, np.float32)).tobytes())
    return digest.hexdigest()[:16]


def read_results(path: Path) -> dict[str, Any] | None:
    """What a file of results holds; None if it is not there or of another version."""
    try:
        found = atomic.read_object(path)
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path} is damaged; remove it and evaluate again") from None
    return found if found.get("version") == VERSION else None


def translations(
    folder: Path,
    system: System,
    config: EvaluateConfig,
    sets: Sequence[stored.HeldOut],
    progress: Progress,
    stage: str = "translate",
) -> tuple[stored.Store, dict[str, list[stored.Translation]]]:
    """What a system makes of every set, and where that is kept."""
    name = "-".join(filter(None, (f"step-{system.step}", system.numbers)))
    place = stored.folder_of(folder, name, config.split, config.beam, config.alpha)
    store = stored.Store(place, {"weights": system.digest})
    return store, stored.translate_all(store, sets, system.translator, progress, stage, config.rows)


def loads_of(
    folder: Path, system: System, sets: Sequence[stored.HeldOut], progress: Progress
) -> Mapping[str, Any]:
    """The expert loads, counted once for each choice of sentences."""
    if system.loads is None:
        return {}
    path = folder / "experts.json"
    counted = {str(held.task): len(held) for held in sets}
    known = atomic.known_object(path) or {}
    if known.get("sentences") == counted and isinstance(known.get("experts"), dict):
        return dict(known["experts"])
    loads = system.loads(sets, progress)
    atomic.write_json(path, {"sentences": counted, "experts": loads})
    return loads


_BUCKETS = 1 << 20
_ROWS = 64  # sentences compared at a time, each with all training text of a language


def from_training(corpus: Corpus, task: Task, sources: Sequence[str]) -> list[str]:
    """For each source the target of the training pair whose source has most trigrams in common.

    Similarity is Jaccard's, of the sets of lower-case character trigrams; of equals, the first.
    """
    columns = ("english", "source") if task.source == "en" else ("source", "english")
    rows = corpus.read(task.foreign, "train", list(columns))
    known, targets = (rows[column].to_pylist() for column in columns)
    if not known:
        return [""] * len(sources)
    train_NB, test_MB = _trigrams(known), _trigrams(sources)
    size_N, size_M = (np.asarray(each.sum(axis=1)).ravel() for each in (train_NB, test_MB))
    found: list[str] = []
    for first in range(0, len(sources), _ROWS):
        part = slice(first, first + _ROWS)
        common_MN = (test_MB[part] @ train_NB.T).toarray()
        jaccard_MN = common_MN / (size_M[part, None] + size_N - common_MN)
        found += [targets[place] for place in jaccard_MN.argmax(axis=1)]
    return found


def _trigrams(texts: Sequence[str]) -> sparse.csr_matrix:
    """Which trigrams, by their hashes, each text has: [texts, buckets] of 0 and 1."""
    padded = [f" {text.lower()} \0" for text in texts]  # no text is empty, and none joins the next
    codes = np.frombuffer("".join(padded).encode("utf-32-le", "surrogatepass"), np.uint32)
    row = np.repeat(np.arange(len(padded)), [len(text) for text in padded])
    within = row[:-2] == row[2:]
    codes = codes.astype(np.uint64)
    hashes = (codes[:-2] * 0x9E3779B1 + codes[1:-1] * 0x85EBCA77 + codes[2:] * 0xC2B2AE3D) >> 7
    places = (row[:-2][within], (hashes[within] % _BUCKETS).astype(np.int64))
    found = sparse.csr_matrix((np.ones(within.sum(), np.float32), places), (len(padded), _BUCKETS))
    found.data[:] = 1  # a trigram that a text has twice was added up
    return found
