"""The card of a released model: what it is, what it was made from, how good it is, what it is not.

Everything in it is read from the run: its settings, what it logged, its scores, its corpus.
Programs read what a release was made from in `release.json` (`provenance`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import gshard
from gshard.mt.config import RunConfig
from gshard.mt.errors import UserError
from gshard.mt.evaluation.evaluate import EVALUATION, read_results
from gshard.mt.run import Run

CARD = "README.md"
_SHOWN = 5  # languages with an example
VERSION = 1  # of release.json


def card(run: Run, step: int, weights: int, size: int, precision: str) -> str:
    """The card in Markdown."""
    sections = [
        f"# {run.name}",
        "\n".join(_model(run, step, weights, size, precision)),
        "```console\necho TEXT | gshard translate THIS_FOLDER\ngshard serve THIS_FOLDER\n```",
        "## Text\n\n" + "\n".join(_text(run)),
        "## Training\n\n" + "\n".join(_training(run, step)),
        "## Scores\n\n" + "\n".join(_scores(run, step)),
        *_examples(run, step),
        "## Limits\n\n" + _LIMITS,
    ]
    return "\n\n".join(sections) + "\n"


_LIMITS = """\
It knows the kind of text that it learned from, and sentences of the lengths it has seen. Low
scores mean outputs that are fluent and wrong; a model with little text may answer with a sentence
that it knows by heart. Look at the scores of a language before you rely on it, and let nobody
mistake its output for a person's translation."""


def _model(run: Run, step: int, weights: int, size: int, precision: str) -> Iterator[str]:
    c, tokenizer = run.config.model, run.tokenizer
    where = " of the encoder" if c.experts_in == "encoder" else ""
    experts = f"{c.experts} experts in every other layer{where}" if c.experts else "no experts"
    languages = len(tokenizer.config.languages)
    targets = sorted({task.target for task in tokenizer.tasks})
    into = "English" if targets == ["en"] else f"{len(targets)} languages"
    yield f"Translates {languages} languages into {into}. A Transformer of {c.encoder_layers} and"
    yield f"{c.decoder_layers} layers, {c.model_dim} wide, {experts}: {weights:,} weights"
    yield f"({size / 1e6:.1f} MB in {precision}), those of step {step:,}."


def _text(run: Run) -> Iterator[str]:
    """How much text of which language; of a corpus that is not here, only which languages."""
    languages = run.tokenizer.config.languages
    try:
        corpus = run.corpus
    except UserError:
        yield f"Languages: {', '.join(languages)}."
        return
    pairs = {language: corpus.count(language) for language in languages}
    yield f"{sum(pairs.values()):,} pairs of sentences:"
    yield ", ".join(f"{language} {count:,}" for language, count in pairs.items()) + "."
    if named := licences(corpus.manifest):
        yield f"\nLicences of its sources: {', '.join(named)}."


def licences(manifest: Mapping[str, Any]) -> list[str]:
    """The licences of the sources of a corpus."""
    stated = (source.get("licence", "") for source in manifest.get("sources", []))
    return sorted({licence for licence in stated if licence})


def _training(run: Run, step: int) -> Iterator[str]:
    c: RunConfig = run.config
    optimizer, batch = c.optimizer, c.batch
    logged = [r for r in run.metrics() if r["step"] <= step]
    tokens = max((r.get("tokens", 0) for r in logged), default=0)
    seconds = max((r.get("seconds", 0.0) for r in logged), default=0.0)
    dev = [r["nll"] for r in logged if r["kind"] == "dev" and r["step"] == step]
    rate, smoothing = optimizer.learning_rate, c.train.label_smoothing
    yield f"{step:,} steps of {batch.rows} rows, {tokens:,} target tokens,"
    yield f"{seconds / 60:.1f} minutes; {optimizer.name}, learning rate {rate:g}, warmup"
    yield f"{optimizer.warmup:,}, label smoothing {smoothing:g}, languages mixed at temperature"
    yield f"{batch.temperature:g}, seed {c.train.seed}."
    if dev:
        yield f"Cross-entropy of dev text: {dev[-1]:.3f} nats a token."


def _scores(run: Run, step: int) -> Iterator[str]:
    found = read_results(run.folder / EVALUATION)
    if found is None or found["checkpoint"] != step:
        yield "These weights were not evaluated (run `gshard evaluate RUN` before the release)."
        return
    search = f"Beam {found['beam']}, alpha {found['alpha']:g}"
    yield f"{search}, {found['split']} sentences; means over languages:\n"
    yield "| | languages | BLEU | chrF++ |"
    yield "|---|---:|---:|---:|"
    for group, mean in found["averages"].items():
        if mean and mean.get("tasks"):
            yield f"| {group} | {mean['tasks']} | {mean['bleu']:.1f} | {mean['chrf']:.1f} |"
    yield "\n| language | pairs | BLEU | chrF++ |"
    yield "|---|---:|---:|---:|"
    for name, task in found["tasks"].items():
        yield f"| {name} | {task['train_pairs']:,} | {task['bleu']:.1f} | {task['chrf']:.1f} |"
    yield "\n" + ", ".join(f"`{signature}`" for signature in found["signatures"].values())


def _examples(run: Run, step: int) -> Iterator[str]:
    """A section of test sentences that nobody chose; none if these weights were not evaluated."""
    found = read_results(run.folder / EVALUATION)
    if found is None or found["checkpoint"] != step or not found.get("examples"):
        return
    first: dict[str, Mapping[str, Any]] = {}
    for example in found["examples"]:
        first.setdefault(example["task"], example)
    ranked = sorted(first, key=lambda task: (-found["tasks"][task]["train_pairs"], task))
    last = len(ranked) - 1
    places = sorted({i * last // (_SHOWN - 1) for i in range(_SHOWN)})
    lines = [
        "## Examples",
        "Nobody chose these: languages evenly spaced from the one with the most training text to "
        "the one with the least, of each the test sentence whose hash comes first.",
    ]
    for task in (ranked[place] for place in places):
        parts = ((name, first[task][name]) for name in ("source", "reference", "translation"))
        lines.append(
            "\n".join([f"{task}:\n", *(f"- {name}: {_plain(text)}" for name, text in parts)])
        )
    yield "\n\n".join(lines)


def _plain(text: str) -> str:
    """Text of a corpus as code, which Markdown leaves alone."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {' '.join(text.split())} {fence}" if text.strip() else "(nothing)"


def provenance(run: Run, step: int, command: str) -> dict[str, Any]:
    """Licences of the text, directions with their pairs and scores, and the command.

    What is unknown, because the corpus is not here or these weights were not evaluated, is null.
    """
    try:
        corpus = run.corpus
    except UserError:
        corpus = None
    found = read_results(run.folder / EVALUATION)
    scored = found["tasks"] if found is not None and found["checkpoint"] == step else {}
    directions = {}
    for task in run.tokenizer.tasks:
        scores = scored.get(str(task), {})
        directions[str(task)] = {
            "pairs": None if corpus is None else corpus.count(task.foreign),
            "bleu": scores.get("bleu"),
            "chrf": scores.get("chrf"),
        }
    return {
        "version": VERSION,
        "gshard": gshard.__version__,
        "run": run.name,
        "step": step,
        "command": command,
        "licences": None if corpus is None else licences(corpus.manifest),
        "vocabulary": run.tokenizer.digest,
        "directions": directions,
    }
