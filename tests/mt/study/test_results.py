"""The arithmetic of a study's figures, done again by hand."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import studied
from gshard.mt.report import measures
from gshard.mt.report.measures import centred_mean
from gshard.mt.study import results, tables
from gshard.mt.study.results import Scored


def model(name="a", scores=None, points=(), seconds=60.0, experts=0):
    spent = (1000, 10, 6000.0, seconds, "chip")
    return Scored(name, name, 6, experts, 0, *spent, scores or {}, curve(points), curve([]))


def curve(points):
    records = (
        {"tokens": tokens, "seconds": seconds, "nll": nll} for tokens, seconds, nll in points
    )
    return measures.curve(records, smooth=False)


def task(bleu, pairs, group, chrf=50.0, target="en"):
    scores = {"bleu": bleu, "chrf": chrf, "train_pairs": pairs, "group": group, "sentences": 9}
    return {**scores, "target": target}


SCORES = {
    "de-en": task(30.0, 900, "high"),
    "fr-en": task(20.0, 1000, "high"),
    "gn-en": task(10.0, 10, "low"),
}
ZERO = {"de-en": task(25.0, 900, "high"), "gn-en": task(4.0, 10, "low", 20.0)}


def test_languages_stand_in_the_order_of_their_text():
    assert results.by_resource(SCORES) == ["fr-en", "de-en", "gn-en"]


def test_gains_are_over_the_baseline_of_the_same_language():
    found = results.over(SCORES, ZERO)
    assert {name: task["bleu"] for name, task in found.items()} == {"de-en": 5.0, "gn-en": 6.0}
    assert results.means(found.values())["bleu_all"] == 5.5
    assert results.means(found.values())["chrf_low"] == 30.0
    assert results.means(results.over(SCORES, {}).values())["bleu_all"] is None


def test_smoothing_is_the_mean_of_ten_languages():
    values = [float(n * n) for n in range(30)]
    assert centred_mean(values)[15] == sum(values[10:20]) / 10
    assert centred_mean(values)[0] == sum(values[:5]) / 5


def test_means_by_resource_and_tokens_a_second():
    found = results.means(SCORES.values())
    assert found["bleu_all"] == 20.0
    assert found["bleu_high"] == 25.0
    assert model(scores=SCORES).tokens_per_second == 100.0


def test_a_model_of_both_directions_has_a_row_for_each():
    back = {
        "en-de": task(12.0, 900, "high", target="de"),
        "en-gn": task(6.0, 10, "low", target="gn"),
    }
    found = model(scores={**SCORES, **back})
    assert [*model(scores=SCORES).by_direction] == ["to-english"]
    assert [*found.by_direction] == ["to-english", "from-english"]
    assert results.means(found.by_direction["to-english"])["bleu_all"] == 20.0
    assert results.means(found.by_direction["from-english"])["bleu_low"] == 6.0
    summary = results._summary(found, {}, 1.0)
    rows = tables.directions({"models": [summary]}).splitlines()
    assert [cell.strip() for cell in rows[3].split("|")][1:-1] == [
        *("a", "from-english", "9.0", "12.0", "", "6.0"),
        *("50.0", "50.0", "", "50.0"),
    ]
    assert tables.directions({"models": [results._summary(model(scores=SCORES), {}, 1.0)]}) == ""


CURVE = [(1000.0, 10.0, 5.0), (2000.0, 20.0, 4.0), (4000.0, 40.0, 3.0)]


@pytest.mark.parametrize(
    ("seconds", "loss"), [(5, 5.0), (10, 5.0), (15, 4.5), (20, 4.0), (30, 3.5), (40, 3.0)]
)
def test_the_loss_at_equal_cost_lies_between_two_points(seconds, loss):
    assert results.at_equal_cost(curve(CURVE), seconds) == loss


def test_past_its_end_a_run_has_no_loss():
    assert results.at_equal_cost(curve(CURVE), 41) is None
    assert results.at_equal_cost(curve([]), 1) is None


def test_efficiency_is_when_a_loss_was_first_reached():
    slow = model("slow", points=[(t, 2 * s, nll) for t, s, nll in CURVE[:2]])
    found = results.efficiency([model("fast", points=CURVE), slow])
    rows = {row["loss"]: row["when"] for row in found}
    assert rows[4.0] == [(2000.0, 20.0), (2000.0, 40.0)]
    assert rows[3.0] == [(4000.0, 40.0), None]


def test_tables_say_what_is_known_and_leave_the_rest_empty():
    rows = tables.efficiency(
        {
            "models": [{"label": "fast"}, {"label": "slow"}],
            "efficiency": [{"loss": 3.0, "when": [[4e6, 90.0], None]}],
        }
    ).splitlines()
    assert rows[0] == "| cross-entropy | fast | slow |"
    assert rows[2] == "| 3 | 4.0M, 1.50 min |  |"


@pytest.mark.parametrize(
    ("study", "shown"),
    [
        ("study", ("models", "resources", "efficiency", "comparisons", "verbatim", "examples")),
        ("longer", ("models", "resources", "efficiency", "comparisons", "verbatim")),
        ("changes", ("models", "comparisons", "verbatim")),
        ("distill", ("models", "resources", "comparisons")),
        ("dropout", ("models", "comparisons", "verbatim")),
        ("both", ("models", "directions")),
    ],
)
def test_the_page_of_the_figure_shows_the_numbers_of_its_studies(study, shown):
    folder = Path(__file__).parents[3] / "docs" / "results"
    results = json.loads((folder / "figure" / f"{study}.json").read_text(encoding="utf-8"))
    page = (folder / "figure.md").read_text(encoding="utf-8")
    for name in shown:
        made = getattr(tables, name, None) or getattr(studied, name)
        assert made(results) in page, name


def test_every_study_of_the_docs_names_a_plan_that_has_its_runs():
    root = Path(__file__).parents[3]
    for path in sorted((root / "docs/results/figure").glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        plan = tomllib.loads((root / "studies" / results["plan"]).read_text(encoding="utf-8"))
        runs = {run["name"] for run in plan["runs"]}
        models = [model["name"] for model in results.get("models", ())] or results["trained"]
        assert {*models} <= runs, path.name


def test_the_figures_have_every_model_and_the_order_of_languages(tmp_path):
    small, large = (model(name, SCORES, CURVE, experts=n) for name, n in (("8E", 8), ("64E", 64)))
    labels = [f"{m.experts} experts, {m.layers} layers" for m in (small, large)]
    for zero, title in ((ZERO, "over bilingual baselines, mean"), ({}, "BLEU, mean of 10")):
        first, *others = studied.draw([small, large], zero, tmp_path)
        found = first.read_text()
        assert title in found
        assert all(f">{text}<" in found for text in (*labels, "de", "gn"))
        assert found.index(">de<") < found.index(">gn<")  # the one with more text first
        for name, path in zip(
            ("chrF++", "million target tokens", "minutes"), others[-3:], strict=True
        ):
            assert name in path.read_text()
    assert studied.draw([model(scores=SCORES)], {}, tmp_path)  # one that has no losses yet


def test_a_figure_names_as_many_languages_as_there_is_room_for(tmp_path):
    scores = {f"{a}{b}-en": task(9.0, 100, "high") for a in "abc" for b in "abcdefghijklmnopqrst"}
    figure, *_ = studied.draw([model(scores=scores)], {}, tmp_path)
    assert len(re.findall(">[abc][a-t]<", figure.read_text())) >= 20
