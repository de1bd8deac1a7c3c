"""A model on text that is far, near and of other domains, next to a copier and bilingual models.

python -m benchmarks.studied_far studies/far.toml studies/bilingual*.toml --out FILE.json
python -m benchmarks.studied_far docs/results/figure/far.json

The first scores what the runs "mixture" and "dense" of the first plan have translated, and of the
bilingual models of the others, for each language, the one with the lowest loss on dev text; the
second prints its tables.
The copier takes the translation of the most similar training sentence. Intervals are of 1,000 draws
of languages and of English sentences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studied import training_targets
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import Tokenizer
from gshard.mt.data.corpus import Corpus
from gshard.mt.evaluation.evaluate import from_training
from gshard.mt.evaluation.scores import FEW, resource_groups, score
from gshard.mt.evaluation.store import HeldOut, Store, folder_of, held_out, tasks_of
from gshard.mt.study.plan import TRAINED, TRANSLATED, Study, read_plan
from gshard.mt.study.results import drawn_languages, drawn_sentences, statistics
from gshard.mt.study.tables import table

Texts = Mapping[str, Sequence[str]]  # what each system made of a language's sentences
SYSTEMS = ("model", "dense", "copier", "bilingual")
AGAINST = (
    ("model", "dense"), ("model", "copier"), ("model", "bilingual"), ("bilingual", "copier"),
)  # fmt: skip
DRAWS = 1000
RUNS = {"model": "mixture", "dense": "dense"}


def bilingual(plans: Sequence[Study], held: HeldOut) -> tuple[list[str], dict[str, Any]] | None:
    """The translations of the model that dev text prefers, and its note with its plan's name."""
    found = []
    for plan in plans:
        assert plan.baselines
        place = plan.place(plan.baselines.of)
        note = atomic.known_object(place / "baselines" / str(held.task) / "note.json")
        if note is not None:
            found.append((note["dev_nll"], plan, place, note))
    if not found:
        return None
    _, plan, place, note = min(found, key=lambda each: each[0])
    search = (plan.evaluate.split, plan.evaluate.beam, plan.evaluate.alpha)
    store = Store(folder_of(place, f"baseline-{held.task}", *search), {"weights": note["system"]})
    return _stored(store, held), {"plan": plan.path.stem, "tried": len(found), **note}


def _stored(store: Store, held: HeldOut) -> list[str]:
    known = [store.get(held.task.target, source) for source in held.sources]
    return [each.text for each in known if each is not None]


def _corpus(plan: Study) -> Corpus:
    return Corpus.open(plan.run(RUNS["model"]).config.data.corpus)


def translated(plan: Study, name: str, sets: Sequence[HeldOut]) -> list[list[str]] | None:
    """What a run made of every set; None if it has not been translated with."""
    place, config = plan.place(name), plan.evaluate
    done = atomic.known_object(place / TRANSLATED)
    if done is None:
        return None
    folder = folder_of(place, f"step-{done['step']}", config.split, config.beam, config.alpha)
    store = Store(folder, {"weights": done["digest"]})
    return [_stored(store, held) for held in sets]


def outputs(
    plan: Study, plans: Sequence[Study]
) -> Iterator[tuple[HeldOut, Texts, dict[str, Any] | None]]:
    """Of each language the sentences, what the systems made of them, and the bilingual's note."""
    corpus, config = _corpus(plan), plan.evaluate
    tasks = tasks_of(Tokenizer.load(plan.folder / "vocabulary"), config.languages)
    sets = held_out(corpus, tasks, config.split, config.sentences)
    made = {system: translated(plan, name, sets) for system, name in RUNS.items()}
    for number, held in enumerate(sets):
        texts = {name: each[number] for name, each in made.items() if each}
        texts["copier"] = from_training(corpus, held.task, held.sources)
        tuned = bilingual(plans, held)
        if tuned:
            texts["bilingual"] = tuned[0]
        yield held, texts, tuned[1] if tuned else None


def measured(plan: Study, plans: Sequence[Study]) -> dict[str, Any]:
    """Scores of every language and test, and their means with intervals."""
    corpus = _corpus(plan)
    groups = resource_groups(corpus, corpus.languages)
    rows, found = [], []
    for held, texts, note in outputs(plan, plans):
        found.append((held, texts))
        row = {"task": str(held.task), "pairs": held.train_pairs, "bilingual": note}
        row |= {"group": groups[held.task.foreign], "tests": {}}
        for test in dict.fromkeys(held.tests):
            mine = [i for i, each in enumerate(held.tests) if each == test]
            row["tests"][test] = {"sentences": len(mine)} | {
                name: score([made[i] for i in mine], [held.references[i] for i in mine]).chrf
                for name, made in texts.items()
            }
        rows.append(row)
    tests = dict.fromkeys(test for held, _ in found for test in held.tests)
    means = {}
    for test in sorted(tests, key=lambda test: (test != "far", test != "near", test)):
        drawn = drawn_scores(found, test)
        for group in ("all", "low"):
            members = {k: v for k, v in drawn.items() if group in ("all", groups[k])}
            means[f"{test} {group}"] = _means(members)
    notes = {name: atomic.known_object(plan.place(name) / TRAINED) for name in RUNS.values()}
    trained = {name: note for name, note in notes.items() if note}
    known = training_targets(corpus, [held.task for held, _ in found])["en"]
    recited = reciting([(held, texts["model"]) for held, texts in found], known, groups)
    scores = {"trained": trained, "means": means, "recited": recited, "languages": rows}
    return {"plan": "far.toml", **scores}


def drawn_scores(
    found: Sequence[tuple[HeldOut, Texts]], test: str
) -> dict[str, dict[str, np.ndarray]]:
    """By language and system chrF++ of a test: its own, and then of each draw of English sentences.

    A sentence is drawn for all languages that have it. Languages with few sentences are left out.
    """
    chosen = [
        (held, texts, [i for i, each in enumerate(held.tests) if each == test])
        for held, texts in found
    ]
    chosen = [each for each in chosen if len(each[2]) >= FEW]
    if not chosen:
        return {}
    english = sorted({held.references[i] for held, _, mine in chosen for i in mine})
    place = {text: n for n, text in enumerate(english)}
    drawn_DE = drawn_sentences(len(english), DRAWS, np.random.default_rng(0))
    weight_DE = np.concatenate([np.ones((1, len(english))), drawn_DE])
    scores: dict[str, dict[str, np.ndarray]] = {}
    for held, texts, mine in chosen:
        references = tuple(held.references[i] for i in mine)
        weight_DN = weight_DE[:, [place[text] for text in references]]
        for name, made in texts.items():
            counted = statistics("chrf", "en", tuple(made[i] for i in mine), references)
            scores.setdefault(held.task.foreign, {})[name] = chrf(weight_DN @ counted)
    return scores


def reciting(
    found: Sequence[tuple[HeldOut, Sequence[str]]],
    known: Collection[str],
    groups: Mapping[str, str],
) -> dict[str, dict[str, float]]:
    """By test the share of outputs that are sentences of the training text, and their scores.

    Of all languages and of each group of them by resource; chrF++ of these outputs and of others.
    """
    each: dict[str, list[tuple[str, bool, str, str]]] = {}
    for held, made in found:
        for test, text, reference in zip(held.tests, made, held.references, strict=True):
            said = (groups[held.task.foreign], text in known, text, reference)
            each.setdefault(test, []).append(said)
    shares = {}
    for test, outputs in each.items():
        row = {
            group: float(
                np.mean([known for mine, known, _, _ in outputs if group in ("all", mine)])
            )
            for group in ("all", *dict.fromkeys(group for group, *_ in outputs))
        }
        for name, recited in (("chrf", True), ("chrf of others", False)):
            mine = [output for output in outputs if output[1] == recited]
            if mine:
                row[name] = score(
                    [output[2] for output in mine], [output[3] for output in mine]
                ).chrf
        shares[test] = row
    return shares


def chrf(counts_DS: np.ndarray) -> np.ndarray:
    """sacreBLEU's chrF++ of summed statistics, for many draws at once."""
    hypothesis_DO, reference_DO, match_DO = np.moveaxis(
        counts_DS.reshape(len(counts_DS), -1, 3), 2, 0
    )
    both_DO = (hypothesis_DO > 0) & (reference_DO > 0)
    orders_D = np.maximum(both_DO.sum(axis=1), 1)
    precision_D, recall_D = (
        np.divide(match_DO, each, out=np.zeros_like(match_DO), where=both_DO).sum(axis=1) / orders_D
        for each in (hypothesis_DO, reference_DO)
    )
    below_D = 4 * precision_D + recall_D
    return 500 * precision_D * recall_D / np.where(below_D > 0, below_D, 1)


def _means(scores: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Means over languages with their intervals, of systems and of their differences."""
    means: dict[str, Any] = {}
    for first, second in (*((name, "") for name in SYSTEMS), *AGAINST):
        has = [v for v in scores.values() if first in v and (not second or second in v)]
        if not has:
            continue
        each_LD = np.stack([v[first] - (v[second] if second else 0) for v in has])
        rng = np.random.default_rng(1)
        draws = zip(drawn_languages(len(has), DRAWS, rng), each_LD.T[1:], strict=True)
        low, high = np.percentile([row[chosen].mean() for chosen, row in draws], [2.5, 97.5])
        means[f"{first} over {second}" if second else first] = {
            "mean": float(each_LD[:, 0].mean()),
            "low": float(low),
            "high": float(high),
            "languages": len(has),
            "worse": int((each_LD[:, 0] < 0).sum()),
        }
    return means


def tables(results: Mapping[str, Any]) -> str:
    """Means by test with their intervals, and chrF++ of every language."""
    has = {name for means in results["means"].values() for name in means}
    both = (f"{first} over {second}" for first, second in AGAINST)
    names = [name for name in (*SYSTEMS, *both) if name in has]
    rows = [[where, *(_cell(means.get(name)) for name in names)]
            for where, means in results["means"].items() if means]  # fmt: skip
    tests = list(dict.fromkeys(t for row in results["languages"] for t in row["tests"]))
    heads = [f"{test} {name}" for test in tests for name in SYSTEMS]
    languages = []
    for row in results["languages"]:
        cells = [row["tests"].get(test, {}).get(name) for test in tests for name in SYSTEMS]
        shown = ["" if cell is None else f"{cell:.1f}" for cell in cells]
        languages.append([row["task"], f"{row['pairs']:,}", *shown])
    columns = list(dict.fromkeys(name for row in results["recited"].values() for name in row))
    recited = [[test, *(_known(row, name) for name in columns)]
               for test, row in results["recited"].items()]  # fmt: skip
    found = [
        table(["test", *names], rows),
        table(["test: training sentences among outputs", *columns], recited),
    ]
    return "\n\n".join([*found, table(["chrF++", "pairs", *heads], languages)])


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    worse = f", {found['worse']} worse" if found["worse"] else ""
    of = f"{found['languages']}{worse}"
    return f"{found['mean']:.1f} ({found['low']:.1f} to {found['high']:.1f}; {of})"


def _known(row: Mapping[str, float], name: str) -> str:
    if name not in row:
        return ""
    return f"{row[name]:.1f}" if name.startswith("chrf") else f"{row[name]:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.plans[0].suffix == ".json":
        results = json.loads(args.plans[0].read_text(encoding="utf-8"))
    else:
        first, *others = [read_plan(path) for path in args.plans]
        results = measured(first, others)
        if args.out:
            atomic.write_json(args.out, results)
    print(tables(results))


if __name__ == "__main__":
    main()
