"""Whether a model is too sure of itself: the probability of its outputs and of the references.

A search looks for outputs that the model finds likely. If a reference is better and the model finds
it likelier, the search is at fault; if the model prefers its own bad output, the model is. Both are
read here by the forward pass of training, teacher forced, which shares no code with the search.

`python -m benchmarks.confidence RUN [RUN ...]` prints a table of runs, and scores by the
length of the reference: what is too short shows there.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gshard.mt.batching.tokenizer import PAD, START
from gshard.mt.decoding.search import BeamConfig
from gshard.mt.decoding.texts import Hypothesis
from gshard.mt.decoding.translator import Translator
from gshard.mt.evaluation.evaluate import EvaluateConfig, search_of
from gshard.mt.evaluation.scores import Scores, score
from gshard.mt.evaluation.store import held_out, tasks_of
from gshard.mt.run import Run
from gshard.nn.config import Batch
from gshard.nn.step import cross_entropy
from gshard.nn.transformer import Transformer

WORDS = (0, 6, 10, 20)  # of references: where the classes of length begin
_ROWS = 64


@dataclass(frozen=True)
class LengthClass:
    """The outputs for references of a class of length."""

    name: str
    sentences: int
    chrf: float
    length: float  # words of the outputs over those of the references


@dataclass(frozen=True)
class Confidence:
    """A system's outputs beside the references, as the system itself sees both."""

    name: str
    scores: Scores
    length: float
    reference_nll: float  # per token
    output_nll: float
    preferred: float  # share of references that would have won the search, had it met them
    search_error: float  # largest difference between a search's score and the forward pass's
    parts: tuple[LengthClass, ...]


@functools.partial(jax.jit, static_argnames="dropless")
def _log_probs(model: Transformer, batch: Batch, dropless: bool) -> Array:
    logits_BTV, _ = model(batch, dropless=dropless)
    real_BT = batch.target_segments > 0
    return -jnp.sum(cross_entropy(logits_BTV, batch.labels) * real_BT, axis=1)


def forced(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    rows: int = _ROWS,
    *,
    dropless: bool = True,
) -> np.ndarray:
    """The log-probability of each target, its end included, by the forward pass of training."""
    source_length, target_length = (
        -(-max(map(len, side)) // 16) * 16 for side in (sources, targets)
    )
    found = []
    for first in range(0, len(sources), rows):
        source = _padded(sources[first : first + rows], rows, source_length)
        target = _padded(targets[first : first + rows], rows, target_length)
        batch = Batch.of(source, target, pad=PAD, start=START)
        found.append(np.asarray(_log_probs(model, batch, dropless)))
    return np.concatenate(found)[: len(sources)]


def _padded(sequences: Sequence[Sequence[int]], rows: int, length: int) -> Array:
    padded = np.full((rows, length), PAD, np.int32)
    for row, ids in zip(padded, sequences, strict=False):
        row[: len(ids)] = ids
    return jnp.asarray(padded)


class _Translated(NamedTuple):
    """A sentence as tokens, its reference, and what the search made of it."""

    source: list[int]
    wanted: list[int]
    reference: str
    output: Hypothesis


def confidence(run: Run, model: Transformer, config: EvaluateConfig) -> Confidence:
    """Translate held-out text that needs no truncation, and compare both directions."""
    found = list(_translated(run, model, config))
    sources = [each.source for each in found]
    wanted, spoken = [each.wanted for each in found], [each.output.tokens for each in found]
    references, texts = [each.reference for each in found], [each.output.text for each in found]
    by_reference, by_output = forced(model, sources, wanted), forced(model, sources, spoken)
    worth = by_output / _norm(spoken, config.alpha)
    searched = np.array([each.output.score for each in found])
    return Confidence(
        run.name,
        score(texts, references),
        _length(texts, references),
        -float(by_reference.sum()) / sum(map(len, wanted)),
        -float(by_output.sum()) / max(sum(map(len, spoken)), 1),
        float(np.mean(by_reference / _norm(wanted, config.alpha) > worth)),
        float(np.abs(searched - worth).max()),
        tuple(_parts(texts, references)),
    )


def _translated(run: Run, model: Transformer, config: EvaluateConfig) -> Iterator[_Translated]:
    tokenizer, search = run.tokenizer, search_of(run, config)
    translator = Translator(model, tokenizer, config=search)
    tasks = tasks_of(tokenizer, config.languages)
    for held in held_out(run.corpus, tasks, config.split, config.sentences):
        encoded = tokenizer.encode_source(held.sources, held.task.target)
        pairs = zip(held.sources, held.references, encoded, strict=True)
        kept = [pair for pair in pairs if len(pair[2]) <= search.longest]
        found = translator.translate([source for source, _, _ in kept], held.task.target)
        wanted = tokenizer.encode_target([reference for _, reference, _ in kept])
        for (_, reference, ids), hypotheses, target in zip(kept, found, wanted, strict=True):
            yield _Translated(ids, target, reference, hypotheses[0])


def _norm(sequences: Sequence[Sequence[int]], alpha: float) -> np.ndarray:
    """What the search divides a sum of log-probabilities by."""
    lengths = jnp.asarray([len(ids) for ids in sequences])
    return np.asarray(BeamConfig(alpha=alpha).norm(lengths))


def _length(texts: Sequence[str], references: Sequence[str]) -> float:
    words = [sum(len(text.split()) for text in side) for side in (texts, references)]
    return words[0] / max(words[1], 1)


def _parts(texts: Sequence[str], references: Sequence[str]) -> Iterator[LengthClass]:
    sizes = np.array([len(reference.split()) for reference in references])
    for first, end in zip(WORDS, (*WORDS[1:], 10**9), strict=True):
        mine = np.flatnonzero((sizes >= first) & (sizes < end)).tolist()
        if len(mine):
            said, wanted = ([side[i] for i in mine] for side in (texts, references))
            name = f"{first} to {end - 1} words" if end < 10**9 else f"{first} words and more"
            yield LengthClass(name, len(mine), score(said, wanted).chrf, _length(said, wanted))


def tables(found: Sequence[Confidence]) -> str:
    """Both tables in Markdown."""
    lines = [
        "| run | BLEU | chrF++ | length | nll of references | nll of outputs | preferred |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for c in found:
        lines.append(
            f"| {c.name} | {c.scores.bleu:.2f} | {c.scores.chrf:.2f} | {c.length:.2f} | "
            f"{c.reference_nll:.3f} | {c.output_nll:.3f} | {c.preferred:.1%} |"
        )
    lines += ["", "| run | reference | sentences | chrF++ | length |", "|---|---:|---:|---:|---:|"]
    for c in found:
        for part in c.parts:
            lines.append(
                f"| {c.name} | {part.name} | {part.sentences:,} | {part.chrf:.2f} | "
                f"{part.length:.2f} |"
            )
    worst = max(c.search_error for c in found)
    return "\n".join([*lines, "", f"search and forward pass differ by {worst:.2g} at most"])


def _main() -> None:
    from gshard.mt import hosts
    from gshard.mt.training.loading import load_model

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--sentences", type=int, default=40, help="of each language; 0 is all")
    parser.add_argument("--split", default="test")
    parser.add_argument("--checkpoint", default="last")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=0.6)
    given = parser.parse_args()
    hosts.start(1)
    hosts.cache_programs()
    config = EvaluateConfig(given.split, (), given.sentences, given.beam, given.alpha)
    runs = [Run.open(folder) for folder in given.runs]
    models = ((run, load_model(run, given.checkpoint)[0]) for run in runs)
    print(tables([confidence(run, model, config) for run, model in models]))


if __name__ == "__main__":
    _main()
