"""The tables of a study in Markdown, from the numbers in its `study.json`.

`python -m gshard.mt.study.tables STUDY.json` prints them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def all_tables(results: Mapping[str, Any]) -> str:
    """Every table under its title."""
    parts = [
        ("What was run", progress(results)),
        ("Models", models(results)),
        ("By resource", resources(results)),
        ("By test", tests(results)),
        ("By direction", directions(results)),
        ("What a training cross-entropy costs", efficiency(results)),
        ("Paired bootstrap over languages and English sentences", comparisons(results)),
        ("Languages", languages(results)),
    ]
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts if text) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first are right-aligned."""
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|" + "|".join(["---"] + ["---:"] * (len(heads) - 1)) + "|")
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def progress(results: Mapping[str, Any]) -> str:
    """How far each planned run is."""
    rows = [
        [run["label"], run["length"], run["stage"], f"{run['step']:,}" if run["step"] else ""]
        for run in results["runs"]
    ]
    return table(["run", "planned", "stage", "steps"], rows)


def models(results: Mapping[str, Any]) -> str:
    """The paper's table: what a model is, what it costs, what it gives."""
    heads = ["model", "weights", "target tokens", "tokens/s", "minutes", "dev loss"]
    heads += [f"training loss at {results['equal_seconds']:.0f} s"]
    heads += ["BLEU", "spBLEU", "chrF++", "ΔBLEU", "ΔchrF++"]
    rows = []
    for model in results["models"]:
        rows.append(
            [
                model["label"],
                _millions(model["weights"]),
                _millions(model["tokens"]),
                f"{model['tokens_per_second']:,.0f}",
                f"{model['seconds'] / 60:.2f}",
                _number(model["dev_nll"], 3),
                _number(model["nll_at_equal_cost"], 3),
                _number(model["bleu"]),
                _number(model.get("spbleu")),
                _number(model["chrf"]),
                _signed(model["delta_bleu"]),
                _signed(model["delta_chrf"]),
            ]
        )
    if zero := results["baselines"]:
        row = [f"{zero['tasks']} bilingual", _millions(zero["weights"]), "", ""]
        row += [f"{zero['seconds'] / 60:.2f}", "", ""]
        rows.append([*row, _number(zero["bleu"]), "", _number(zero["chrf"]), "0", "0"])
    return _without_empty(heads, rows)


def resources(results: Mapping[str, Any]) -> str:
    """Means by the amount of training text, and over the baselines."""
    groups = ("high", "mid", "low")
    heads = ["model"]
    for metric in ("BLEU", "chrF++"):
        heads += [f"{metric} {group}" for group in groups]
    for metric in ("ΔBLEU", "ΔchrF++"):
        heads += [f"{metric} {group}" for group in groups]
    rows = []
    for model in results["models"]:
        row = [model["label"]]
        for metric in ("bleu", "chrf"):
            row += [_number(model[f"{metric}_{group}"]) for group in groups]
        for metric in ("bleu", "chrf"):
            row += [_signed(model[f"delta_{metric}_{group}"]) for group in groups]
        rows.append(row)
    if zero := results["baselines"]:
        row = [f"{zero['tasks']} bilingual"]
        for metric in ("bleu", "chrf"):
            row += [_number(zero[f"{metric}_{group}"]) for group in groups]
        rows.append([*row, *["0"] * 6])
    return _without_empty(heads, rows)


def tests(results: Mapping[str, Any]) -> str:
    """Far, near and other domains, of all models, of the bilingual ones and of the copier.

    The copier has the translation of the most similar training sentence; `low` is the quarter of
    the languages with the least text.
    """
    rows: dict[str, Mapping[str, Any]] = {
        model["label"]: model["tests"] for model in results["models"] if model.get("tests")
    }
    if not rows:
        return ""
    copier = next(iter(rows.values()))
    if zero := results["baselines"]:
        rows[f"{zero['tasks']} bilingual"] = zero.get("tests", {})
    scores = (("BLEU", "all", "bleu"), ("chrF++", "all", "chrf"), ("chrF++ low", "low", "chrf"))
    heads = [f"{test} {title}" for test in copier for title, _, _ in scores]
    cells = [
        [label, *_means([found.get(test, {}) for test in copier], [s[1:] for s in scores])]
        for label, found in rows.items()
    ]
    nearest = [(group, f"nearest_{key}") for _, group, key in scores]
    cells.append(["copier", *_means(copier.values(), nearest)])
    return _without_empty(["model", *heads], cells)


def _means(tests: Iterable[Mapping[str, Any]], wanted: Sequence[tuple[str, str]]) -> list[str]:
    return [_number(test.get(group, {}).get(key)) for test in tests for group, key in wanted]


def directions(results: Mapping[str, Any]) -> str:
    """Means by direction and amount of training text, of models that translate both ways."""
    groups = ("all", "high", "mid", "low")
    rows = [
        [model["label"], each["direction"]]
        + [_number(each[f"{metric}_{group}"]) for metric in ("bleu", "chrf") for group in groups]
        for model in results["models"]
        if len(model.get("directions", ())) > 1
        for each in model["directions"]
    ]
    heads = [f"{metric} {group}" for metric in ("BLEU", "chrF++") for group in groups]
    return table(["model", "direction", *heads], rows) if rows else ""


def efficiency(results: Mapping[str, Any]) -> str:
    """Tokens and minutes to a loss, by model."""
    names = [model["label"] for model in results["models"]]
    rows = []
    for row in results["efficiency"]:
        cells = [
            "" if when is None else f"{when[0] / 1e6:.1f}M, {when[1] / 60:.2f} min"
            for when in row["when"]
        ]
        rows.append([f"{row['loss']:g}", *cells])
    return table(["cross-entropy", *names], rows) if rows else ""


def comparisons(results: Mapping[str, Any]) -> str:
    """How sure it is that one model is better than another."""
    rows = []
    for each in results["comparisons"]:
        for group, metrics in each["groups"].items():
            for metric, title in (("bleu", "BLEU"), ("chrf", "chrF++")):
                found = metrics[metric]
                interval = f"{found['low']:+.2f} to {found['high']:+.2f}"
                languages = f"{group} ({found['languages']})"
                row = [f"{each['first']} over {each['second']}", languages, title]
                rows.append([*row, _signed(found["mean"], 2), interval, f"{found['p']:.3f}"])
    heads = ["comparison", "languages", "score", "difference", "95% interval", "p"]
    return table(heads, rows) if rows else ""


def languages(results: Mapping[str, Any]) -> str:
    """chrF++ of every language and model."""
    names = [model["label"] for model in results["models"]]
    rows = [
        [row["task"], f"{row['pairs']:,}", _number(row.get("copier_chrf"))]
        + [_number(value) for value in (row["baseline_chrf"], *row["chrf"])]
        for row in results["languages"]
    ]
    return _without_empty(["chrF++", "pairs", "copier", "bilingual", *names], rows)


def _without_empty(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that no row has anything in."""
    kept = [n for n in range(len(heads)) if any(row[n] for row in rows)]
    return table([heads[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{round(value, digits) + 0.0:+.{digits}f}"


def _millions(value: float) -> str:
    return f"{value / 1e6:,.1f}M"


if __name__ == "__main__":
    print(all_tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
