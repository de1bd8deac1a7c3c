"""What a study finds besides scores: what its experts learnt, recited training text, examples.

python -m benchmarks.studied studies/figure.toml              of the runs in its folder
python -m benchmarks.studied docs/results/figure/study.json   of a study of the docs
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gshard.mt import atomic
from gshard.mt.atomic import known_object
from gshard.mt.batching.tokenizer import Task
from gshard.mt.data.corpus import Corpus
from gshard.mt.evaluation.evaluate import EVALUATION
from gshard.mt.evaluation.store import tasks_of
from gshard.mt.report.measures import centred_mean
from gshard.mt.run import Run
from gshard.mt.study import results
from gshard.mt.study.plan import Study, read_plan
from gshard.mt.study.results import Scored, paired_translations
from gshard.mt.study.tables import table
from gshard.pages import Chart, ChartAxis, Series, curves

Shares = Mapping[str, Sequence[Sequence[float]]]  # by task: for each layer, each expert's share


@dataclass(frozen=True)
class LayerUse:
    """One layer of experts: bits about the language, and each language's nearest other one."""

    side: str
    layer: int
    bits: float
    nearest: dict[str, str]


def layers_of(experts: Mapping[str, Shares]) -> list[LayerUse]:
    """Every layer with experts, the encoder's first, from the loads of `evaluation.json`."""
    found = []
    for side in ("encoder", "decoder"):
        tasks = sorted(experts.get(side, {}))
        if len(tasks) < 2:
            continue
        shares_TLE = np.array([experts[side][task] for task in tasks], np.float64)
        for layer in range(shares_TLE.shape[1]):
            shares_TE = shares_TLE[:, layer]
            shares_TE = shares_TE / np.maximum(shares_TE.sum(axis=1, keepdims=True), 1e-12)
            nearest = [tasks[place] for place in nearest_other(shares_TE)]
            pairs = dict(zip(tasks, nearest, strict=True))
            found.append(LayerUse(side, layer, information(shares_TE), pairs))
    return found


def information(shares_TE: np.ndarray) -> float:
    """The mutual information of language and expert in bits, all languages equally likely.

    It is 0 if all languages use the experts alike, and log2 of the number of experts at most.
    """
    mean_E = shares_TE.mean(axis=0)
    ratio_TE = np.divide(shares_TE, mean_E, out=np.ones_like(shares_TE), where=shares_TE > 0)
    return float(np.mean(np.sum(shares_TE * np.log2(ratio_TE), axis=1)))


def nearest_other(shares_TE: np.ndarray) -> list[int]:
    """For each language the other one that uses the experts most alike, by the cosine."""
    unit_TE = shares_TE / np.maximum(np.linalg.norm(shares_TE, axis=1, keepdims=True), 1e-12)
    alike_TT = unit_TE @ unit_TE.T
    np.fill_diagonal(alike_TT, -np.inf)
    return [int(place) for place in alike_TT.argmax(axis=1)]


@dataclass(frozen=True)
class Recited:
    """How much of a system's output is training text, how much is right, and its length."""

    verbatim: float  # share of outputs that are sentences of the training text
    exact: float  # share of outputs that are the reference
    length: float  # words of all outputs, over those of all references


def copied(
    pairs: Mapping[str, Sequence[tuple[str, str]]], known: Mapping[str, Collection[str]]
) -> Recited:
    """From (output, reference) by target language, and the training text in each of them.

    Where no held-out sentence is in the training text, an output that is one is not its reference,
    however fluent. Lengths are compared as well: memorized outputs are mostly short.
    """
    total = verbatim = exact = words = wanted = 0
    for target, each in pairs.items():
        for output, reference in each:
            total += 1
            verbatim += output in known[target]
            exact += output == reference
            words += len(output.split())
            wanted += len(reference.split())
    return Recited(verbatim / max(total, 1), exact / max(total, 1), words / max(wanted, 1))


def training_targets(corpus: Corpus, tasks: Sequence[Task]) -> dict[str, set[str]]:
    """The distinct sentences of the training text in each target language."""
    found: dict[str, set[str]] = {}
    for task in tasks:
        column = "english" if task.target == "en" else "source"
        texts = corpus.read(task.foreign, "train", [column])[column].to_pylist()
        found.setdefault(task.target, set()).update(texts)
    return found


def used_experts(plan: Study, found: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """How each mixture's layers use their experts."""
    uses = {}
    for model in found:
        evaluation = known_object(plan.place(model.name) / EVALUATION) or {}
        if layers := layers_of(evaluation.get("experts", {})):
            uses[model.label] = [dataclasses.asdict(layer) for layer in layers]
    return uses


def recited(plan: Study, found: Sequence[Scored]) -> dict[str, Any]:
    """How much of each model's output is its training text."""
    run = Run.open(plan.place(found[0].name))
    train = training_targets(run.corpus, tasks_of(run.tokenizer, plan.evaluate.languages))
    shares = {}
    for model in found:
        pairs: dict[str, list[tuple[str, str]]] = {}
        for pair in paired_translations(plan, model.name, model.name).values():
            outputs = zip(pair.first, pair.references, strict=True)
            pairs.setdefault(pair.target, []).extend(outputs)
        shares[model.name] = {"label": model.label, **dataclasses.asdict(copied(pairs, train))}
    return shares


def some_examples(plan: Study, found: Sequence[Scored]) -> list[dict[str, Any]]:
    """To read: the first sentence by its hash of the largest, the middle and the least language."""
    order = results.by_resource(found[0].scores)
    shown: list[dict[str, Any]] = []
    for task in dict.fromkeys(order[place] for place in (0, len(order) // 2, -1)):
        entry: dict[str, Any] = {}
        for model in found:
            evaluation = known_object(plan.place(model.name) / EVALUATION) or {}
            mine = [each for each in evaluation.get("examples", []) if each["task"] == task]
            if mine:
                entry.setdefault("translations", {})[model.label] = mine[0]["translation"]
                entry |= {name: mine[0][name] for name in ("task", "source", "reference")}
        shown += [entry] if entry else []
    return shown


def verbatim(results: Mapping[str, Any]) -> str:
    """How much of a model's output is a sentence of its training text."""
    rows = [
        [
            each["label"],
            f"{each['verbatim']:.1%}",
            f"{each['exact']:.1%}",
            f"{each['length']:.2f}",
        ]
        for each in results["recited"].values()
    ]
    heads = ["model", "sentences of the training text", "exactly the reference", "length"]
    return table(heads, rows)


def experts(results: Mapping[str, Any]) -> str:
    """Bits that an expert tells about the language, and pairs that use the experts most alike."""
    rows = []
    for label, layers in results["experts"].items():
        for layer in layers:
            mutual = sorted(
                f"{a.partition('-')[0]} and {b.partition('-')[0]}"
                for a, b in layer["nearest"].items()
                if a < b and layer["nearest"][b] == a
            )
            place = f"{layer['side']} {layer['layer'] + 1}"
            rows.append([label, place, f"{layer['bits']:.2f}", ", ".join(mutual[:12])])
    heads = ["model", "layer", "bits", "nearest to each other, the first twelve by name"]
    return table(heads, rows) if rows else ""


def examples(results: Mapping[str, Any]) -> str:
    """What each model makes of a few sentences."""
    parts = []
    for each in results["examples"]:
        rows = [["source", each["source"]], ["reference", each["reference"]]]
        rows += [[label, text] for label, text in each["translations"].items()]
        rows = [[head, text.replace("|", "\\|").replace("\n", " ")] for head, text in rows]
        lines = ["| | " + each["task"] + " |", "|---|---|"]
        parts.append("\n".join([*lines, *(f"| {head} | {text} |" for head, text in rows)]))
    return "\n\n".join(parts)


TITLES = {"bleu": "BLEU", "chrf": "chrF++"}
_CLOCKS = (("tokens", "tokens", 1e6, "million target tokens"), ("time", "seconds", 60.0, "minutes"))
_HEIGHT = 330


def draw(found: Sequence[Scored], zero: Mapping[str, Mapping[str, Any]], out: Path) -> list[Path]:
    """All figures that there are numbers for."""
    charts = {f"{metric}_by_language": by_language(found, zero, metric) for metric in TITLES}
    for name, clock, scale, unit in _CLOCKS:
        charts[f"loss_by_{name}"] = _losses(found, clock, scale, unit)
    for name, chart in charts.items():
        with atomic.new_file(out / f"{name}.svg") as part:
            chart.save(part)
    return [out / f"{name}.svg" for name in charts]


def _series(
    model: Scored, found: Sequence[Scored], points: Sequence[tuple[float, float]]
) -> Series:
    """A colour for each number of experts, dashes for the shallower models, faint the shorter runs.

    A run without a label of its own is called by what sets it apart.
    """
    kinds = sorted({each.experts for each in found})
    alike = [m for m in found if (m.experts, m.layers) == (model.experts, model.layers)]
    is_short = model.step < max(each.step for each in alike)
    label = model.label
    if label == model.name:
        label = f"{model.experts} experts" if model.experts else "dense"
        label += f", {model.layers} layers{', short' * is_short}"
        label += f", seed {model.seed}" if len({each.seed for each in alike}) > 1 else ""
    is_shallow = model.layers < max(each.layers for each in found)
    colour = f"var(--s{kinds.index(model.experts) % 12})"
    return Series(points, label, colour, dashed=is_shallow, faint=is_short)


def by_language(
    found: Sequence[Scored], zero: Mapping[str, Mapping[str, Any]], metric: str
) -> Chart:
    """The paper's figure: over the baselines if there are any, else the scores themselves."""
    tasks = {**zero, **{name: task for model in found for name, task in model.scores.items()}}
    order = results.by_resource(tasks)
    series = []
    for model in found:
        shown = results.over(model.scores, zero) if zero else model.scores
        values = [shown[n][metric] if n in shown else None for n in order]
        smooth = enumerate(centred_mean(values))  # over ten languages, as in the paper
        points = [(float(place), value) for place, value in smooth if value is not None]
        series.append(_series(model, found, points))
    title = f"{TITLES[metric]}{' over bilingual baselines' if zero else ''}"
    labels = [name.partition("-")[0] for name in order]
    x = ChartAxis("languages, those with the most training text first", labels=labels)
    y = ChartAxis(f"{title}, mean of 10 languages", zero=bool(zero))
    return curves(f"{title} by language", series, x, y, _HEIGHT)


def _losses(found: Sequence[Scored], clock: str, scale: float, unit: str) -> Chart:
    """Training cross-entropy against tokens or against time."""
    series: list[Series] = []
    ends: list[float] = []
    for model in found:
        losses = model.curve.smoothed
        times = (record[clock] / scale for record in model.curve.records)
        series.append(_series(model, found, list(zip(times, losses, strict=True))))
        ends += losses[len(losses) // 10 :]
    y = ChartAxis("cross-entropy", *((min(ends) - 0.05, max(ends)) if ends else ()))
    return curves("Training cross-entropy", series, ChartAxis(unit, low=0.0), y, _HEIGHT)


def findings(plan: Study) -> dict[str, Any]:
    """All of it, of the runs of a plan that are scored."""
    found = results.models(plan)
    return {
        "experts": used_experts(plan, found),
        "recited": recited(plan, found),
        "examples": some_examples(plan, found),
    }


def main() -> None:
    """Print the tables."""
    path = Path(sys.argv[1])
    if path.suffix == ".toml":
        plan = read_plan(path)
        results = findings(plan)
        draw(results.models(plan), results.baselines(plan), Path(sys.argv[2]))
    else:
        results = json.loads(path.read_text("utf-8"))
    print(*(made(results) for made in (verbatim, experts, examples)), sep="\n\n")


if __name__ == "__main__":
    main()
