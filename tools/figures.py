"""`python -m tools.figures`: the figures of docs/results/figure.md, from the scores there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.studied import TITLES, by_language
from gshard.mt.report.measures import Curve
from gshard.mt.study.results import Scored

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "figure"
PLANS = {"study": "", "longer": "longer_", "longest": "longest_"}  # and how their figures begin


def drawn(results: dict[str, Any], metric: str) -> Any:
    """The chart of a study's scores by language."""
    rows = results["languages"]
    found = []
    for n, model in enumerate(results["models"]):
        scores = {
            row["task"]: {metric: row[metric][n], "train_pairs": row["pairs"]}
            for row in rows
            if row[metric][n] is not None
        }
        about = (model["layers"], model["experts"], model["seed"], model["weights"], model["step"])
        used = (model["tokens"], model["seconds"], model["device"])
        curves = [Curve((), (), 1)] * 2  # the losses are not in the file
        found.append(Scored(model["name"], model["label"], *about, *used, scores, *curves))
    zero = {
        row["task"]: {metric: row[f"baseline_{metric}"], "train_pairs": row["pairs"]}
        for row in rows
        if row.get(f"baseline_{metric}") is not None
    }
    return by_language(found, zero, metric)


def main() -> None:
    """Draw those that there are again."""
    for plan, prefix in PLANS.items():
        results = json.loads((FOLDER / f"{plan}.json").read_text(encoding="utf-8"))
        for metric in TITLES:
            path = FOLDER / f"{prefix}{metric}_by_language.svg"
            if path.exists():
                drawn(results, metric).save(path)


if __name__ == "__main__":
    main()
