"""A model on text that is far, near and of other domains, next to a copier and bilingual models.

python -m benchmarks.studied_far studies/far.toml studies/bilingual*.toml --out FILE.json
python -m benchmarks.studied_far docs/results/figure/far.json

The first scores what the first run of the first plan has translated, and of the bilingual models of
the others, for each language, those with the lowest loss on dev text; the second prints its tables.
The copier takes the translation of the most similar training sentence. Intervals are of 1,000 draws
of languages and of English sentences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard.mt import atomic
from gshard.mt.data.corpus import Corpus
from gshard.mt.evaluation import copier
from gshard.mt.evaluation.scores import FEW, resource_groups, score
from gshard.mt.evaluation.store import HeldOut, Store, folder_of, held_out, tasks_of
from gshard.mt.run import Run
from gshard.mt.study.analysis import PairedTexts, paired_bootstrap
from gshard.mt.study.plan import TRAINED, TRANSLATED, Study, read_plan
from gshard.mt.study.tables import table

Texts = Mapping[str, Sequence[str]]  # what each system made of a language's sentences
SYSTEMS = ("model", "copier", "bilingual")


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


def outputs(
    plan: Study, plans: Sequence[Study]
) -> Iterator[tuple[HeldOut, Texts, dict[str, Any] | None]]:
    """Of each language the sentences, what the systems made of them, and the bilingual's note."""
    place, config = plan.place(plan.runs[0].name), plan.evaluate
    run, done = Run.open(place), atomic.read_object(place / TRANSLATED)
    corpus = Corpus.open(run.config.data.corpus)
    tasks = tasks_of(run.tokenizer, config.languages)
    folder = folder_of(place, f"step-{done['step']}", config.split, config.beam, config.alpha)
    store = Store(folder, {"weights": done["digest"]})
    for held in held_out(corpus, tasks, config.split, config.sentences):
        texts = {
            "model": _stored(store, held),
            "copier": copier.from_training(corpus, held.task, held.sources),
        }
        tuned = bilingual(plans, held)
        if tuned:
            texts["bilingual"] = tuned[0]
        yield held, texts, tuned[1] if tuned else None


def measured(plan: Study, plans: Sequence[Study]) -> dict[str, Any]:
    """Scores of every language and test, and their means with intervals."""
    place = plan.place(plan.runs[0].name)
    run = Run.open(place)
    groups = resource_groups(run.corpus, run.tokenizer.config.languages)
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
        for group in ("all", "low"):
            members = [each for each in found if group in ("all", groups[each[0].task.foreign])]
            means[f"{test} {group}"] = _means(members, test)
    trained = atomic.read_object(place / TRAINED)
    return {"trained": trained, "means": means, "languages": rows}


def _means(found: Sequence[tuple[HeldOut, Texts]], test: str) -> dict[str, Any]:
    """chrF++ of each system, and how much better the model is, over languages with enough text."""
    means: dict[str, Any] = {}
    for first, second in (("model", ""), ("copier", ""), ("bilingual", ""), *_AGAINST):
        pairs = []
        for held, texts in found:
            mine = [i for i, each in enumerate(held.tests) if each == test]
            if len(mine) < FEW or first not in texts or (second and second not in texts):
                continue
            sides = [
                tuple(texts[name][i] if name else "" for i in mine) for name in (first, second)
            ]
            references = tuple(held.references[i] for i in mine)
            pairs.append(PairedTexts(sides[0], sides[1], references, references))
        if pairs:
            difference = paired_bootstrap(pairs, "chrf")
            name = f"{first} over {second}" if second else first
            means[name] = {k: getattr(difference, k) for k in ("mean", "low", "high", "languages")}
    return means


_AGAINST = (("model", "copier"), ("model", "bilingual"), ("bilingual", "copier"))


def tables(results: Mapping[str, Any]) -> str:
    """Means by test with their intervals, and chrF++ of every language."""
    names = list(dict.fromkeys(name for means in results["means"].values() for name in means))
    rows = [[where, *(_cell(means.get(name)) for name in names)]
            for where, means in results["means"].items() if means]  # fmt: skip
    tests = list(dict.fromkeys(t for row in results["languages"] for t in row["tests"]))
    heads = [f"{test} {name}" for test in tests for name in SYSTEMS]
    languages = []
    for row in results["languages"]:
        cells = [row["tests"].get(test, {}).get(name) for test in tests for name in SYSTEMS]
        shown = ["" if cell is None else f"{cell:.1f}" for cell in cells]
        languages.append([row["task"], f"{row['pairs']:,}", *shown])
    return table(["test", *names], rows) + "\n\n" + table(["chrF++", "pairs", *heads], languages)


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{found['mean']:.1f} ({found['low']:.1f} to {found['high']:.1f}; {found['languages']})"


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
