"""The tables of a study in Markdown, from the numbers in its `study.json`.

`python -m gshard.mt.study.tables STUDY.json` prints them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_Column = tuple[str, str, Callable[[Any], str]]  # its head, a model's key, and how it is written


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
    at_equal_cost = f"training loss at {results['equal_seconds']:.0f} s"
    columns: list[_Column] = [
        ("model", "label", str),
        ("weights", "weights", _millions),
        ("target tokens", "tokens", _millions),
        ("tokens/s", "tokens_per_second", lambda rate: f"{rate:,.0f}"),
        ("minutes", "seconds", lambda seconds: f"{seconds / 60:.2f}"),
        ("dev loss", "dev_nll", lambda loss: _number(loss, 3)),
        (at_equal_cost, "nll_at_equal_cost", lambda loss: _number(loss, 3)),
        *(("BLEU", "bleu", _number), ("spBLEU", "spbleu", _number), ("chrF++", "chrf", _number)),
        *(("ΔBLEU", "delta_bleu", _signed), ("ΔchrF++", "delta_chrf", _signed)),
    ]
    return _of_models(results, columns)


def resources(results: Mapping[str, Any]) -> str:
    """Means by the amount of training text, and over the baselines."""
    columns: list[_Column] = [("model", "label", str)]
    for sign, prefix, form in (("", "", _number), ("Δ", "delta_", _signed)):
        columns += [
            (f"{sign}{title} {group}", f"{prefix}{metric}_{group}", form)
            for title, metric in (("BLEU", "bleu"), ("chrF++", "chrf"))
            for group in ("high", "mid", "low")
        ]
    return _of_models(results, columns)


def _of_models(results: Mapping[str, Any], columns: Sequence[_Column]) -> str:
    """A row for each model, and one for the bilingual ones together, whose gains are 0."""
    rows = [
        ["" if (value := model.get(key)) is None else form(value) for _, key, form in columns]
        for model in results["models"]
    ]
    if zero := results["baselines"]:
        known = {**zero, "label": f"{zero['tasks']} bilingual"}
        cells = [form(known[key]) if key in known else "" for _, key, form in columns]
        gains = [head.startswith("Δ") for head, *_ in columns]
        rows.append(["0" if gain else cell for gain, cell in zip(gains, cells, strict=True)])
    return _without_empty([head for head, *_ in columns], rows)


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

    def cell(when: Sequence[float] | None) -> str:
        return "" if when is None else f"{when[0] / 1e6:.1f}M, {when[1] / 60:.2f} min"

    rows = [[f"{row['loss']:g}", *map(cell, row["when"])] for row in results["efficiency"]]
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
