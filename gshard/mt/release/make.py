"""A release from a run: what translating needs, and nothing that only training does.

It is a run's folder too: `gshard translate`, `serve` and `evaluate` take it as they take a run.
The weights are rounded to bfloat16, which halves the file, or to 8 bits, which halves it again; of
each file that translations depend on there is a checksum. How the model was computed in training
(kernels for one GPU, say) is left behind: a release runs anywhere.

Its model card, `README.md`, is written from what is known and names what is not.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

import gshard
from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.config import DataConfig, DeviceConfig, RunConfig, to_json
from gshard.mt.decoding.detect import detector_of
from gshard.mt.evaluation.evaluate import EVALUATION, read_results
from gshard.mt.run import CONFIG, Run
from gshard.mt.training import weights as files
from gshard.mt.training.loading import load_model
from gshard.nn.config import Int8

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
    entries = (corpus.manifest["languages"][each].get("train", {}) for each in languages)
    origins = sum((Counter(entry.get("origins", {})) for entry in entries), Counter[str]())
    most = (f"{_plain(name)} {n / origins.total():.0%}" for name, n in origins.most_common(8))
    more = f", and {len(origins) - 8:,} more" if len(origins) > 8 else ""
    yield f"\nSources: {', '.join(most)}{more}."
    if known := licences(corpus.manifest):
        yield f"\nLicences of its sources: {', '.join(known)}."


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
        yield f"Cross-entropy of dev text: {dev[-1]:.3f} nats per token."


def _evaluated(run: Run, step: int) -> dict[str, Any]:
    """What the evaluation of these weights found; {} if there was none."""
    found = read_results(run.folder / EVALUATION) or {}
    return found if found.get("checkpoint") == step else {}


def _scores(run: Run, step: int) -> Iterator[str]:
    found = _evaluated(run, step)
    if not found:
        yield "These weights were not evaluated (run `gshard evaluate RUN` before the release)."
        return
    search = f"Beam {found['beam']}, alpha {found['alpha']:g}"
    yield f"{search}, {found['split']} sentences; means over languages, and chrF++ of copying the"
    yield "translation of the most similar training sentence:\n"
    yield "| | languages | BLEU | chrF++ | copied |"
    yield "|---|---:|---:|---:|---:|"
    tests = {f"test: {test}": means.get("all") for test, means in found.get("tests", {}).items()}
    for group, mean in {**found["averages"], **tests}.items():
        if mean and mean.get("tasks"):
            copied = f"{mean['nearest_chrf']:.1f}" if "nearest_chrf" in mean else ""
            cells = (f"{mean['bleu']:.1f}", f"{mean['chrf']:.1f}", copied)
            yield f"| {group} | {mean['tasks']} | {' | '.join(cells)} |"
    yield "\n| language | pairs | BLEU | chrF++ |"
    yield "|---|---:|---:|---:|"
    for name, task in found["tasks"].items():
        yield f"| {name} | {task['train_pairs']:,} | {task['bleu']:.1f} | {task['chrf']:.1f} |"
    yield "\n" + ", ".join(f"`{signature}`" for signature in found["signatures"].values())


def _examples(run: Run, step: int) -> Iterator[str]:
    """A section of test sentences that nobody chose; none if these weights were not evaluated."""
    found = _evaluated(run, step)
    if not found.get("examples"):
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
    scored = _evaluated(run, step).get("tasks", {})
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
    for name, leaf in files.named(model).items():
        array = np.asarray(leaf)
        if not np.isfinite(array.astype(np.float32)).all():
            raise UserError(f"{run.folder}: {name} of step {step} holds values that are not finite")
        arrays[name] = _rounded(name, array, precision)
    with atomic.new_folder(out) as part:
        run.tokenizer.save(part / files.VOCABULARY)
        files.write_weights(part / files.WEIGHTS, arrays, {"step": str(step), "run": run.name})
        atomic.write_json(part / CONFIG, to_json(anywhere(run.config)))
        size = (part / files.WEIGHTS).stat().st_size
        text = card(run, step, files.count_of(model), size, precision)
        (part / CARD).write_text(text, encoding="utf-8")
        if detector := detector_of(run):
            detector.save(part / files.DETECTOR)
        command = f"gshard release {run.name} --out {out.name} --checkpoint {step}"
        command += f" --precision {precision}"
        atomic.write_json(part / files.MADE, provenance(run, step, command))
        files.write_checksums(part, files.verified_in(part))
    return out


def _rounded(name: str, array: np.ndarray, precision: Precision) -> np.ndarray | Int8:
    """A weight as it is written; what has no form in 8 bits is small and stays in float32."""
    if precision != "int8":
        return array.astype(precision)
    axes = files.summed_axes(name)
    return Int8.of(array, axes) if axes else array.astype("float32")


def verify(run: Run) -> int:
    """The number of weights of a release whose files are those that were released; else an error.

    An error too for a release of an earlier version, which has no checksums.
    """
    if not files.is_release(run):
        raise UserError(f"{run.folder} is not a release; `gshard release {run.folder} --out NEW`")
    if why := files.release_problem(run) or (
        "" if files.has_checksums(run) else files.unverifiable(run)
    ):
        raise UserError(why)
    return sum(map(math.prod, run.weight_shapes.values()))


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
