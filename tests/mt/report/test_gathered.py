"""The report of runs whose files are missing, damaged or hostile."""

import html
import json
import random
import re

import pytest

from gshard.mt.report import write_report
from gshard.mt.report.gathered import gather
from tests.mt.browser import act, open_page
from tests.mt.report import made_up_runs
from tests.mt.report.page_reader import Page, lines, read


def test_what_is_missing_or_damaged_is_named(runs, page):
    text = page.text
    assert "broken: config.json is damaged" in text
    assert "broken: metrics.jsonl: one line is damaged and left out (the first is line 158)" in text
    assert "broken: evaluation.json is damaged" in text
    assert f"gshard evaluate {runs[2]}" in text
    assert "unfinished: 4,200 of 20,000 steps" in text
    assert "dense is compared with the baselines of moe-16" in text


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_no_file_can_break_it(runs, tmp_path, seed):
    """Cut, swap and replace parts of every file at random: a page comes out, or a UserError."""
    draw = random.Random(seed)
    junk = [None, True, "x", -1, 1e400, float("nan"), [], {}, [[]], 10**400, "\ud800", "</script>"]

    def spoil(value, depth=0):
        if draw.random() < 0.04 * depth:
            return draw.choice(junk)
        if isinstance(value, dict):
            return {key: spoil(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list):
            return [spoil(each, depth + 1) for each in value[:3]]
        return value

    for trial in range(3):
        folder = tmp_path / str(trial)
        for run in runs[:2]:
            (folder / run.name).mkdir(parents=True)
            for name in ("config.json", "evaluation.json", "baselines.json"):
                if (run / name).exists():
                    text = json.dumps(spoil(read(run, name)))
                    text = text[: draw.randrange(len(text))] if draw.random() < 0.1 else text
                    (folder / run.name / name).write_text(text)
            kept = [spoil(each, 1) for each in lines(run, "train") + lines(run, "dev")]
            text = "".join(json.dumps(each) + "\n" for each in kept)
            (folder / run.name / "metrics.jsonl").write_text(text)
        out = write_report([folder / run.name for run in runs[:2]], folder / "out.html")[0]
        Page(out)  # whole, and its numbers are JSON


def test_a_run_that_went_back_is_told_once(tmp_path):
    steps = [10, 20, 30, 40, 20, 30]  # killed at 40, resumed from 10
    records = [{"kind": "train", "step": s, "nll": n, "tokens": s} for n, s in enumerate(steps)]
    made_up_runs.write_metrics(tmp_path, records)
    (run,) = gather([tmp_path])
    assert [(r["step"], r["nll"]) for r in run.train] == [(10, 0), (20, 4), (30, 5)]


def test_a_name_that_no_chart_can_have(tmp_path):
    """Most of these would abort the process that draws."""
    odd = ["\0", "\x1b[2J", "\ufffe", "\u2028", "'zero", "\x7f"]
    tasks = {
        f"{name}-en": {"language": name, "target": "en", "bleu": 1.0, "train_pairs": 9}
        for name in odd
    }
    run = tmp_path / "run"
    run.mkdir()
    (run / "evaluation.json").write_text(json.dumps({"version": 1, "tasks": tasks}))
    page = write_report([run], tmp_path / "page.html")[0].read_text(encoding="utf-8")
    assert "\0" not in page
    assert "\x1b" not in page
    assert "'zero" in html.unescape(page)  # what can be written is


def test_text_stays_text(tmp_path):
    """Markup in a run's name, a translation, a task or a signature is shown, not obeyed."""
    bad = "<img src=x onerror=document.title='obeyed'>"
    closing = "</script ><script>document.title='obeyed'</script><!--"
    run = tmp_path / "<" / f"script>{bad}".replace("/", "")
    tasks = {f"{bad}-en": {"language": bad, "target": "en", "bleu": 1.0, "train_pairs": 9}}
    example = {"task": f"{bad}-en", "source": closing, "reference": bad, "translation": closing}
    value = {"version": 1, "split": bad, "tasks": tasks, "examples": [example]}
    value |= {"signatures": {bad: closing}, "experts": {"encoder": {f"{bad}-en": [[0.5, 0.5]]}}}
    made_up_runs.write(run / "evaluation.json", value)
    (run / "metrics.jsonl").write_text(closing)
    path, _ = write_report([run], tmp_path / "page.html")
    page = Page(path)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    assert page.numbers["examples"]["list"][0]["translations"][0][1] == closing
    document, console = open_page(path, tmp_path)
    assert console == []
    assert "<img" not in re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    assert "<title>obeyed" not in document
    shown = act(path, tmp_path, "return [document.title, one('.translated').textContent]")
    assert shown[0] != "obeyed"
    assert shown[1] == closing
