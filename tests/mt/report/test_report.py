"""The report: its numbers are those of the files."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gshard import cli
from gshard.errors import UserError
from gshard.mt.report import measures, write_report
from gshard.mt.report.gathered import Gathered
from tests.mt.browser import act
from tests.mt.report import made_up_runs
from tests.mt.report.made_up_runs import LANGUAGES
from tests.mt.report.page_reader import Page, lines, read


def test_scores_are_those_of_the_files(runs, page):
    moe, dense = runs[:2]
    base = read(moe, "baselines.json")["tasks"]
    for run, table in ((moe, "languages-0"), (dense, "languages-1")):
        tasks = read(run, "evaluation.json")["tasks"]
        assert list(page.column(table, "BLEU")) == [f"{name}-en" for name in LANGUAGES]
        for title, key in (
            ("Training pairs", "train_pairs"),
            ("Sentences", "sentences"),
            ("BLEU", "bleu"),
            ("chrF++", "chrf"),
            ("Copy", "copy_bleu"),
            ("Nearest", "nearest_bleu"),
            ("Untrained", "untrained_bleu"),
        ):
            expected = {name: task.get(key) for name, task in tasks.items()}
            assert page.column(table, title) == expected
        assert page.column(table, "Baseline") == {name: base[name]["bleu"] for name in tasks}
        for name, delta in page.column(table, "ΔBLEU").items():
            bleu = tasks[name].get("bleu")
            expected = None if bleu is None else pytest.approx(bleu - base[name]["bleu"])
            assert delta == expected
    few = [row for row in page.tables["languages-0"][1:] if "few" in row[3]["text"]]
    assert len(few) == 0
    assert "few" not in page.tables["languages-0"][1][3]["text"]


def test_few_sentences_are_marked_and_left_out_as_the_evaluation_says(runs, tmp_path):
    value = read(runs[0], "evaluation.json")
    tasks = value["tasks"]
    tasks["de-en"]["sentences"] = 60
    tasks["sat-en"] |= {"sentences": 4, "few": True, "bleu": 99.0}
    del value["averages"]
    far = {"tasks": 7, "bleu": 20.5, "chrf": 44.25, "nearest_bleu": 9.5}
    value["tests"] = {"far": {"all": far}, "damaged": 3}
    made_up_runs.write(tmp_path / "run" / "evaluation.json", value)
    page = Page(write_report([tmp_path / "run"])[0])
    marks = {row[0]["value"]: row[3]["text"] for row in page.tables["languages-0"][1:]}
    assert marks["de-en"] == "few 60"
    assert marks["sat-en"] == "few* 4"
    assert marks["pt-en"] == "500"
    counted = [task["bleu"] for name, task in tasks.items() if name != "sat-en"]
    first = page.tables["averages"][1]
    assert float(first[3]["value"]) == pytest.approx(sum(counted) / len(counted))
    assert first[2]["value"] == "105"
    last = {cell["text"] for cell in page.tables["averages"][-1]}
    assert {"test: far", "7", "20.5", "44.2", "9.5"} <= last


def test_averages_and_models_are_those_of_the_files(runs, page):
    rows = page.tables["averages"][1:]
    base = read(runs[0], "baselines.json")["tasks"]
    for run, place in ((runs[0], 0), (runs[1], 4)):
        stated = read(run, "evaluation.json")
        for row, group in zip(rows[place : place + 4], ("all", "high", "mid", "low"), strict=True):
            assert row[1]["text"] == group
            assert float(row[3]["value"]) == stated["averages"][group]["bleu"]
            assert float(row[4]["value"]) == stated["averages"][group]["chrf"]
            gains = [
                task["bleu"] - base[name]["bleu"]
                for name, task in stated["tasks"].items()
                if group in ("all", task["group"]) and "bleu" in task
            ]
            assert float(row[9]["value"]) == pytest.approx(sum(gains) / len(gains))
    assert page.column("models-table", "Experts") == {
        "moe-16": 16, "dense": 0, "young": 8, "broken": None, "106 bilingual baselines": None
    }  # fmt: skip
    assert page.column("models-table", "Weights")["moe-16"] == 41_300_000
    assert page.column("models-table", "Steps")["young"] == 4200
    assert page.column("models-table", "Devices")["dense"] == 8
    assert page.column("models-table", "Tokens")["broken"] == lines_of_broken(runs)["tokens"]
    assert page.column("models-table", "Time")["dense"] == lines(runs[1], "train")[-1]["seconds"]


def lines_of_broken(runs):
    """The last whole line of the damaged run that has everything."""
    return json.loads((runs[3] / "metrics.jsonl").read_text().splitlines()[-4])


def test_the_chart_of_gains_has_the_numbers_of_the_files(runs, page):
    base = read(runs[0], "baselines.json")["tasks"]
    assert [task["task"] for task in page.numbers["tasks"]] == [f"{n}-en" for n in LANGUAGES]
    assert [series["run"] for series in page.numbers["quality"]] == [0, 1]
    for series, run in zip(page.numbers["quality"], runs, strict=False):
        tasks = read(run, "evaluation.json")["tasks"]
        delta = []
        for name in LANGUAGES:
            bleu = tasks[f"{name}-en"].get("bleu")
            delta.append(None if bleu is None else bleu - base[f"{name}-en"]["bleu"])
        for found, expected in zip(series["delta"], delta, strict=True):
            assert found == (None if expected is None else pytest.approx(expected, abs=1e-4))
        for found, expected in zip(series["delta_smooth"], plain_smooth(delta), strict=True):
            assert found == (None if expected is None else pytest.approx(expected, abs=1e-4))


def plain_smooth(values):
    """Five before, itself, four after, of those that are known."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    smooth = [None] * len(values)
    for n, (place, _) in enumerate(known):
        total, count = 0.0, 0
        for other in range(len(known)):
            if n - 5 <= other <= n + 4:
                total += known[other][1]
                count += 1
        smooth[place] = total / count
    return smooth


def test_the_last_step_is_the_one_that_was_saved():
    """A run that its time ends at step 97 logs step 90, and saves 97 with its dev loss."""
    logged = {"step": 90, "tokens": 57_300, "seconds": 4.0, "nll": 3.0}
    saved = {"step": 97, "tokens": 61_804, "seconds": 4.4, "nll": 2.9}
    run = Gathered("a", Path("a"), train=(logged,), dev=(saved,))
    assert run.last == {**saved, "nll": 3.0}
    assert Gathered("a", Path("a"), train=(saved,), dev=(logged,)).last == saved


def test_smoothing():
    draw = random.Random(0)
    values = [draw.gauss(0, 5) if draw.random() > 0.2 else None for _ in range(57)]
    for found, expected in zip(measures.centred_mean(values), plain_smooth(values), strict=True):
        assert found == (None if expected is None else pytest.approx(expected))
    assert measures.centred_mean([]) == []
    assert measures.centred_mean([3.0]) == [3.0]
    values = [draw.random() for _ in range(40)]
    for window in (1, 3, 100):
        for n, found in enumerate(measures.trailing_mean(values, window)):
            near = values[max(0, n - window + 1) : n + 1]
            assert found == pytest.approx(sum(near) / len(near))


def test_tokens_to_reach_a_loss(runs, page):
    """Against a plain scan over the file."""
    for kind, table in (("train", "reached-training"), ("dev", "reached-dev")):
        heads = [cell["text"] for cell in page.tables[table][0]]
        losses = [float(head) for head in heads[1:]]
        assert 3 <= len(losses) <= 8
        assert losses == sorted(losses, reverse=True)
        reached = 0
        for run in runs[:3]:
            records = lines(run, kind)
            window = len(records) // 50 if kind == "train" else 1
            row = next(r for r in page.tables[table][1:] if r[0]["value"] == run.name)
            for loss, cell in zip(losses, row[1:], strict=True):
                tokens = None
                for n in range(len(records)):
                    near = [r["nll"] for r in records[max(0, n - window + 1) : n + 1]]
                    if sum(near) / len(near) <= loss:
                        tokens = records[n]["tokens"]
                        break
                assert cell["value"] == (None if tokens is None else str(tokens))
                reached += tokens is not None
        assert reached >= len(losses)  # the lowest is one that some run reached


def test_thresholds_fit_what_the_runs_reached():
    def falling(start, end, count=100):
        records = [{"nll": end + (start - end) * 0.9**n} for n in range(count)]
        return measures.curve(records, smooth=False)

    for curves in (
        [falling(9, 0.52), falling(9, 0.71)],
        [falling(9, 2.0)],
        [falling(5, 4.9)],
        [falling(3, 3)],
        [falling(2.31, 2.3, 1)],
    ):
        losses = measures.thresholds(curves)
        assert 1 <= len(losses) <= 8
        low = min(min(curve.smoothed) for curve in curves)
        assert all(loss >= low for loss in losses)
        assert any(curve.reached(losses[-1]) for curve in curves)
    assert measures.thresholds([]) == []


def test_curves_are_those_of_the_files(runs, page):
    for loss, run in zip(page.numbers["loss"], runs, strict=True):
        if run.name == "broken":
            continue
        train, dev = lines(run, "train"), lines(run, "dev")
        by_step = {record["step"]: record for record in train}
        shown = loss["train"]
        assert shown["step"][0] == train[0]["step"]
        assert shown["step"][-1] == train[-1]["step"]
        assert len(shown["step"]) == min(500, len(train))
        for step, tokens, raw in zip(shown["step"], shown["tokens"], shown["raw"], strict=True):
            assert tokens == by_step[step]["tokens"]
            assert raw == pytest.approx(by_step[step]["nll"], abs=1e-4)
        assert loss["dev"]["nll"] == pytest.approx([r["nll"] for r in dev], abs=1e-4)


def test_experts_corpus_and_examples_are_those_of_the_files(runs, page):
    value = read(runs[0], "evaluation.json")
    (shown,) = page.numbers["experts"]
    assert (shown["run"], shown["experts"], shown["together"]) == (0, 16, 1)
    for side, tasks in value["experts"].items():
        for n, name in enumerate(LANGUAGES):
            for found, row in zip(shown["sides"][side][str(n)], tasks[f"{name}-en"], strict=True):
                assert found == [round(10_000 * share) for share in row]
    (corpus,) = page.numbers["corpora"]
    assert corpus["runs"] == ["moe-16", "dense", "young"]
    assert corpus["pairs"] == [[n, made_up_runs.pairs(rank)] for rank, n in enumerate(LANGUAGES)]
    examples = page.numbers["examples"]["list"]
    assert len(examples) == 4 * len(LANGUAGES)
    said = {(e["task"], e["source"]): e["translation"] for e in value["examples"]}
    for example in examples:
        texts = {run: text for run, text, *_ in example["translations"]}
        assert texts[0] == said[example["task"], example["source"]]
        assert set(texts) == {0, 1}


def test_nothing_is_fetched_and_the_size_is_sane(path, page):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_500_000
    for tag, found in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert "src" not in found
        assert found.get("href", "#").startswith("#")
    urls = set(re.findall(r"https?://[^\s\"']+", text))
    assert urls <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names of SVG
    assert not re.search(r"@import|url\((?!#)", text)


@pytest.mark.slow
def test_very_many_experts_and_examples_still_fit(tmp_path):
    tasks = made_up_runs.scores(2, 0)
    value = made_up_runs.evaluation(tasks, 0, 10, 10, 0)
    row = [1 / 512] * 512
    value["experts"] = {
        side: {name: [row] * 6 for name in tasks} for side in ("encoder", "decoder")
    }
    long = {"reference": "r" * 3_000, "translation": "t" * 3_000}
    value["examples"] = [
        {"task": name, "source": f"{n} " * 500, **long} for name in tasks for n in range(12)
    ]
    for name in ("a", "b", "c"):
        made_up_runs.write(tmp_path / name / "evaluation.json", value)
    path, _ = write_report([tmp_path / name for name in "abc"], tmp_path / "page.html")
    assert path.stat().st_size < 3_000_000
    page = Page(path)
    shown = page.numbers["experts"][0]
    cells = shown["sides"]["encoder"]["0"][0]
    assert len(cells) == 512 // shown["together"]
    assert cells == [round(10_000 * shown["together"] / 512)] * len(cells)
    examples = page.numbers["examples"]
    assert examples["all"] == 12 * len(tasks)
    assert {example["task"] for example in examples["list"]} == set(tasks)


def test_several_directions_and_runs_of_one_name(tmp_path):
    tasks = made_up_runs.scores(2, 0)
    both = dict(tasks)
    for name, task in tasks.items():
        language = name.removesuffix("-en")
        both[f"en-{language}"] = {**task, "target": language, "bleu": task["bleu"] / 2}
    value = made_up_runs.evaluation(both, 0, 10, 10, 0)
    for place in ("x", "y"):
        made_up_runs.write(tmp_path / place / "run" / "evaluation.json", value)
    folders = [tmp_path / place / "run" for place in ("x", "y", "x")]
    page = Page(write_report(folders, tmp_path / "page.html")[0])
    assert page.numbers["runs"] == ["x/run", "y/run"]
    series = page.numbers["quality"][0]
    for into in (True, False):
        places = [n for n, task in enumerate(page.numbers["tasks"]) if task["into"] == into]
        assert len(places) == len(LANGUAGES)
        expected = plain_smooth([series["bleu"][place] for place in places])
        found = [series["bleu_smooth"][place] for place in places]
        assert found == pytest.approx(expected, abs=2e-4)
    shown = act(
        tmp_path / "page.html",
        tmp_path,
        """
        const chart = () => all("#quality-chart .chart").find((each) => !each.closest("[hidden]"));
        const dots = () => [...chart().querySelectorAll(".wide path")].filter((each) =>
          each.getAttribute("d").includes("A")).length, before = dots();
        press("#quality-controls", "from English");
        return [before, dots(), point(chart(), 70, 100)];
        """,
    )
    assert shown[:2] == [2 * len(LANGUAGES)] * 2
    assert "(en-" in shown[2]


def test_the_command(capsys, tmp_path, runs, monkeypatch):
    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["report", *map(str, arguments)])
        printed = capsys.readouterr()
        return stopped.value.code, printed.out, printed.err

    monkeypatch.chdir(tmp_path)
    code, out, _ = run(runs[2])
    assert code == 0
    assert f"gshard evaluate {runs[2]}" in out
    assert (runs[2] / "report.html").is_file()
    code, out, _ = run(*runs)
    assert code == 0
    assert "broken: config.json is damaged" in out
    assert (tmp_path / "report.html").is_file()
    assert run(runs[0], "--out", tmp_path / "new" / "a.html")[0] == 0
    assert (tmp_path / "new" / "a.html").is_file()
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["a.html"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["nowhere"], "there is no run at nowhere"),
        (["empty"], "empty is not a run"),
        ([runs[0], "--out", tmp_path / "file" / "a.html"], "cannot write"),
    ):
        code, _, errors = run(*arguments)
        assert code == 1
        assert message in errors
        assert "Traceback" not in errors
    assert run()[0] == 2
    with pytest.raises(UserError):
        write_report([])


def test_it_imports_nothing_heavy(runs):
    """A report is written quickly, from the files alone."""
    script = (
        "import sys; from gshard.mt.report.page import render; "
        "from gshard.mt.report.gathered import gather; "
        f"render(gather([{str(runs[0])!r}])); "
        "print([m for m in ('pyarrow', 'sacrebleu', 'sentencepiece', 'matplotlib', 'orbax') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.fixture
def small(runs, tmp_path):
    """A run of five languages on 8 devices, without experts and without examples."""
    value = read(runs[0], "evaluation.json")
    kept = [f"{name}-en" for name in LANGUAGES[:5]]
    value["tasks"] = {name: value["tasks"][name] | {"bleu": 0.3, "copy_bleu": 3.1} for name in kept}
    for name in ("averages", "experts", "examples"):
        value.pop(name, None)
    made_up_runs.write(tmp_path / "small" / "evaluation.json", value)
    lines = [{**line, "devices": 8} for line in made_up_runs.metrics(400, 2.0, 0, 1)]
    made_up_runs.write_metrics(tmp_path / "small", lines)
    return write_report([tmp_path / "small"])[0]


def test_five_languages_have_points_and_no_mean_over_ten(small):
    page = Page(small)
    (series,) = page.numbers["quality"]
    assert series["bleu"] == [0.3] * 5
    assert series["bleu_smooth"] == [None] * 5
    assert "mean over a centred window" not in page.text


def test_a_score_stands_beside_what_copying_gets_and_devices_are_shown(small):
    page = Page(small)
    assert "copying the source gets 3.1" in page.text
    assert page.column("models-table", "Devices") == {"small": 8}


def test_what_is_empty_is_folded(small):
    text = small.read_text(encoding="utf-8")
    folded = re.search(r'<details id="empty">.*?</details>', text, re.DOTALL)[0]
    assert "experts, translations" in folded
    assert '<section id="experts"' not in text
    assert '<a href="#experts">' not in text
    assert '<section id="training"' in text
