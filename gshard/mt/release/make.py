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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from gshard.pages import render as fill_in

if TYPE_CHECKING:
    from gshard.mt.data.corpus import Corpus

CARD = "README.md"
_SHOWN = 5  # languages with an example
_SOURCES = 8  # of the text, that are named
VERSION = 1  # of release.json


def card(
    run: Run, step: int, weights: int, size: int, precision: str, form: str = "card.md"
) -> str:
    """The card in Markdown, by a template: what is known, and the name of what is not."""
    scored, corpus = _evaluated(run, step), _corpus(run)
    logged = [record for record in run.metrics() if record["step"] <= step]
    dev = [r["nll"] for r in logged if r["kind"] == "dev" and r["step"] == step]
    tests = {f"test: {test}": means.get("all") for test, means in scored.get("tests", {}).items()}
    text = fill_in(
        Path(__file__).parent,
        form,
        run=run,
        config=run.config,
        languages=run.tokenizer.config.languages,
        targets=sorted({task.target for task in run.tokenizer.tasks}),
        step=step,
        weights=weights,
        megabytes=size / 1e6,
        precision=precision,
        text=corpus and _text(corpus, run.tokenizer.config.languages),
        tokens=max((record.get("tokens", 0) for record in logged), default=0),
        minutes=max((record.get("seconds", 0.0) for record in logged), default=0.0) / 60,
        dev=dev[-1] if dev else None,
        scored=scored,
        means={**scored.get("averages", {}), **tests},
        examples=_examples(scored),
        plain=_plain,
    )
    return text + "\n"


def _corpus(run: Run) -> Corpus | None:
    """The corpus that it learned from; None if that is not here."""
    try:
        return run.corpus
    except UserError:
        return None


def _text(corpus: Corpus, languages: Sequence[str]) -> dict[str, Any]:
    """How much text of which language and from where."""
    entries = (corpus.manifest["languages"][each].get("train", {}) for each in languages)
    origins = sum((Counter(entry.get("origins", {})) for entry in entries), Counter[str]())
    return {
        "pairs": {language: corpus.count(language) for language in languages},
        "sources": {name: n / origins.total() for name, n in origins.most_common(_SOURCES)},
        "more": len(origins) - _SOURCES,
        "licences": licences(corpus.manifest),
    }


def licences(manifest: Mapping[str, Any]) -> list[str]:
    """The licences of the sources of a corpus."""
    stated = (source.get("licence", "") for source in manifest.get("sources", []))
    return sorted({licence for licence in stated if licence})


def _evaluated(run: Run, step: int) -> dict[str, Any]:
    """What the evaluation of these weights found; {} if there was none."""
    found = read_results(run.folder / EVALUATION) or {}
    return found if found.get("checkpoint") == step else {}


def _examples(scored: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The first test sentence of some languages, from the most training text to the least."""
    first: dict[str, Mapping[str, Any]] = {}
    for example in scored.get("examples", ()):
        first.setdefault(example["task"], example)
    ranked = sorted(first, key=lambda task: (-scored["tasks"][task]["train_pairs"], task))
    places = {i * (len(ranked) - 1) // (_SHOWN - 1) for i in range(_SHOWN)} if ranked else ()
    return [first[ranked[place]] for place in sorted(places)]


def _plain(text: str) -> str:
    """Text of a corpus as code, which Markdown leaves alone."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {' '.join(text.split())} {fence}" if text.strip() else "(nothing)"


def provenance(run: Run, step: int, command: str) -> dict[str, Any]:
    """Licences of the text, directions with their pairs and scores, and the command.

    What is unknown, because the corpus is not here or these weights were not evaluated, is null.
    """
    corpus, scored = _corpus(run), _evaluated(run, step).get("tasks", {})
    directions = {
        str(task): {"pairs": corpus and corpus.count(task.foreign)}
        | {metric: scored.get(str(task), {}).get(metric) for metric in ("bleu", "chrf")}
        for task in run.tokenizer.tasks
    }
    return {
        "version": VERSION,
        "gshard": gshard.__version__,
        "run": run.name,
        "step": step,
        "command": command,
        "licences": corpus and licences(corpus.manifest),
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
