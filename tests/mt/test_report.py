import html.parser
import json
import math
import random
import re
import subprocess
import sys

import made_up_runs
import pytest
from browser import act, open_page
from made_up_runs import LANGUAGES

from gshard import cli
from gshard.mt.errors import UserError
from gshard.mt.report import measures, write_report
from gshard.mt.report.gathered import gather


class Page(html.parser.HTMLParser):
    """A page read without a browser: its tags, its tables by id, its text and its numbers."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.tags, self.tables, self.text, self.scripts = [], {}, "", []
        self.cell = self.table = None
        self.feed(path.read_text(encoding="utf-8"))
        self.numbers = json.loads(next(t for a, t in self.scripts if a.get("id") == "numbers"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if tag == "table":
            self.table = self.tables.setdefault(found["id"], [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.cell = {"text": "", "value": found.get("data-value")}
            self.table[-1].append(self.cell)
        elif tag == "script":
            self.scripts.append((found, ""))

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None
        elif tag == "table":
            self.table = None

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.scripts[-1][1] == "":
            self.scripts[-1] = (self.scripts[-1][0], data)
            return
        self.text += data
        if self.cell is not None:
            self.cell["text"] += data

    def column(self, table, title):
        """{first cell: exact value} of a column; None where there is none."""
        heads = [cell["text"] for cell in self.tables[table][0]]
        place = heads.index(title)
        found = {}
        for row in self.tables[table][1:]:
            value = row[place]["value"]
            found[row[0]["value"]] = float(value) if value not in (None, "") else None
        return found


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def lines(folder, kind):
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == kind:
            found.append(record)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return made_up_runs.make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def path(runs):
    return write_report(runs, runs[0].parent / "report.html")[0]


@pytest.fixture(scope="module")
def page(path):
    return Page(path)


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
            assert float(row[8]["value"]) == pytest.approx(sum(gains) / len(gains))
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


def test_what_is_missing_or_damaged_is_named(runs, page):
    text = page.text
    assert "broken: config.json is damaged" in text
    assert "broken: metrics.jsonl: one line is damaged and left out (the first is line 158)" in text
    assert "broken: evaluation.json is damaged" in text
    assert f"gshard evaluate {runs[2]}" in text
    assert "unfinished: 4,200 of 20,000 steps" in text
    assert "dense is compared with the baselines of moe-16" in text


@pytest.mark.parametrize("seed", range(4))
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


def test_nothing_is_fetched_and_the_size_is_sane(path, page):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_500_000
    for tag, found in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert "src" not in found
        assert found.get("href", "#").startswith("#")
    urls = set(re.findall(r"https?://[^\s\"']+", text))
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)", text)


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
        const dots = () => all("#quality-chart circle").length, before = dots();
        press("#quality-controls", "from English");
        return [before, dots(), point(one("#quality-chart svg"), 60, 100)];
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
        (["empty"], "empty is no run"),
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


def test_in_a_browser(path, tmp_path):
    """The page as it is, its policy in force: no complaint, every chart drawn."""
    document, console = open_page(path, tmp_path)
    assert console == []
    for chart in ("corpora", "loss-chart", "quality-chart", "heat-chart", "health-overflow"):
        assert re.search(rf'id="{chart}">(<div class="legend">.*?</div>)?<svg', document), chart
    assert "German" in document


def test_charts_have_their_points(path, tmp_path):
    found = act(
        path,
        tmp_path,
        """
        const points = (d) => d.split(/[ML]/).length - 1;
        const curves = (box, kind) =>
          all(`${box} path.${kind}`).map((each) => points(each.getAttribute("d")));
        return {
          corpora: all("#corpora circle").length,
          gains: all("#quality-chart circle").length,
          smooth: all("#quality-chart path.curve").map((each) => points(each.getAttribute("d"))),
          loss: curves("#loss-chart", "curve:not(.faint):not(.dashed)"),
          dev: curves("#loss-chart", "dashed"),
          heat: all("#heat-chart .cell").length,
          health: all(".grid-of-charts svg").length,
          labelled: all("svg").every((svg) => svg.getAttribute("aria-label")),
          inputs: all("input, select").every((each) => each.closest("label")),
        };
        """,
    )
    assert found == {
        "corpora": 106,
        "gains": 106 + 105,
        "smooth": [106, 105],
        "loss": [500, 500, 210, 150],
        "dev": [24, 24, 8, 6],
        "heat": 106 * 16,
        "health": 8,
        "labelled": True,
        "inputs": True,
    }


def test_sorting_and_searching(runs, path, tmp_path):
    found = act(
        path,
        tmp_path,
        """
        const names = () => all("#languages-1 tbody tr").filter((row) => !row.hidden)
          .map((row) => row.cells[0].querySelector("small")?.textContent
            || row.cells[0].textContent);
        const shown = () => all(".panel").filter((each) => !each.hidden).map((each) => each.id);
        const before = shown();
        press("#language-controls", "dense");
        const after = shown();
        press("#languages-1", "BLEU");
        const down = names(), sorted = one("#languages-1 [aria-sort]").getAttribute("aria-sort");
        press("#languages-1", "BLEU");
        const up = names();
        press("#languages-1", "Language");
        const letters = all("#languages-1 tbody tr").map((row) => row.cells[0].textContent);
        type("#language-search", "GERMAN");
        const german = names(), told = one("#language-found").textContent;
        type("#language-search", "");
        return { before, after, down, sorted, up, letters, german, told, all: names().length };
        """,
    )
    tasks = read(runs[1], "evaluation.json")["tasks"]
    scores = {name: tasks[f"{name}-en"].get("bleu") for name in LANGUAGES}
    known = [name for name in LANGUAGES if scores[name] is not None]
    assert found["before"] == ["panel-all"]
    assert found["after"] == ["panel-1"]
    assert found["sorted"] == "descending"
    assert found["down"] == [*sorted(known, key=lambda name: -scores[name]), "fr"]
    assert found["up"] == [*sorted(known, key=lambda name: scores[name]), "fr"]
    assert found["letters"][0] == "Afrikaans af"
    assert found["german"] == ["de", "nds"] or found["german"] == ["de"]
    assert found["told"] == f"{len(found['german'])} found"
    assert found["all"] == 106


def test_the_heat_map_and_its_switches(runs, path, tmp_path):
    found = act(
        path,
        tmp_path,
        """
        const cells = () => all("#heat-chart .cell");
        const tell = (n, e) => {
          const svg = one("#heat-chart svg"), cell = cells()[n * 16 + e].getBoundingClientRect();
          const frame = svg.getBoundingClientRect();
          return point(svg, cell.left - frame.left + cell.width / 2,
            cell.top - frame.top + cell.height / 2);
        };
        const told = { "encoder 0": tell(3, 5) };
        press("#heat-controls", "2");
        told["encoder 1"] = tell(3, 5);
        press("#heat-controls", "decoder");
        told["decoder 1"] = tell(3, 5);
        const svg = one("#heat-chart svg");
        svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        const keys = one("#tip").innerText;
        one("#heat-table").open = true;
        one("#heat-table").dispatchEvent(new Event("toggle"));
        const row = all("#heat-table tbody tr")[3];
        const heat = (cell) => parseFloat(cell.style.getPropertyValue("--v"));
        return { told, keys, row: [...row.cells].map((cell) => cell.textContent),
          heat: cells().slice(48, 64).map(heat) };
        """,
    )
    experts = read(runs[0], "evaluation.json")["experts"]
    for place, text in found["told"].items():
        side, layer = place.split()
        share = experts[side]["de-en"][int(layer)][5]
        assert "German (de)" in text
        assert "expert 6" in text
        assert f"{100 * round(share, 4):.1f}%" in text
        assert f"{16 * round(share, 4):.2f}" in text
    assert "Russian" in found["keys"]
    shown = experts["decoder"]["de-en"][1]
    assert found["row"] == ["German (de)", *(f"{100 * round(x, 4):.1f}%" for x in shown)]
    shares = sorted(
        round(10_000 * x)
        for tasks in experts.values()
        for rows in tasks.values()
        for row in rows
        for x in row
    )
    top = max(2 * 10_000 / 16, shares[math.floor(0.998 * (len(shares) - 1))])
    expected = [min(100, 100 * round(10_000 * x) / top) for x in shown]
    assert found["heat"] == pytest.approx(expected, abs=0.51)


def test_hovering_and_the_switch_of_clocks(runs, path, tmp_path):
    found = act(
        path,
        tmp_path,
        """
        const svg = () => one("#loss-chart svg"), wide = svg().clientWidth;
        const tokens = point(svg(), wide - 12, 100);
        press("#loss-controls", "steps");
        const steps = point(svg(), wide - 12, 100);
        press("#loss-controls", "time of training");
        const text = [...svg().querySelectorAll("text")].map((each) => each.textContent);
        const quality = one("#quality-chart svg");
        quality.focus();
        for (let n = 0; n < 4; n++)
          quality.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        const german = one("#tip").innerText;
        press("#quality-controls", "BLEU");
        const bleu = all("#quality-chart text").map((each) => each.textContent);
        return { tokens, steps, text, german, bleu,
          corpus: point(one("#corpora svg"), one("#corpora circle").cx.baseVal.value, 40) };
        """,
    )
    last = lines(runs[0], "train")[-1]
    assert "24.6M target tokens" in found["tokens"]
    assert last["tokens"] == 24_600_000
    assert "12k steps" in found["steps"]
    assert f"{lines(runs[0], 'dev')[-1]['nll']:.2f}" in found["steps"]
    assert "time of training" in found["text"]
    tasks = read(runs[0], "evaluation.json")["tasks"]
    base = read(runs[0], "baselines.json")["tasks"]
    gain = tasks["de-en"]["bleu"] - base["de-en"]["bleu"]
    assert f"German (de), {tasks['de-en']['train_pairs']:,} pairs" in found["german"]
    assert f"+{gain:.1f}" in found["german"]
    assert "copy of source" in found["bleu"]
    assert "baselines" in found["bleu"]
    assert f"1. Portuguese (pt): {made_up_runs.pairs(0):,}" in found["corpus"]


def test_translations_can_be_filtered(path, tmp_path):
    found = act(
        path,
        tmp_path,
        """
        const tasks = () => all(".example").map((each) => each.dataset.task);
        const first = tasks().length;
        one("#example-more").click();
        const more = tasks().length;
        type("#example-task", "ar-en", "change");
        const arabic = tasks(), side = getComputedStyle(one(".example .source")).direction;
        type("#example-task", "", "change");
        type("#example-search", "GEÖFFNET");
        return { first, more, arabic, side, found: tasks(),
          told: one("#example-found").textContent };
        """,
    )
    assert found == {
        "first": 10,
        "more": 30,
        "arabic": ["ar-en"] * 4,
        "side": "rtl",
        "found": ["de-en"] * 4,
        "told": "4 of 424",
    }


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_windows_do_not_scroll_sideways(path, tmp_path, width):
    found = act(
        path,
        tmp_path,
        """
        const page = document.documentElement;
        return { wide: page.clientWidth, needs: page.scrollWidth, charts: all(".chart svg").every(
          (svg) => svg.getBoundingClientRect().right <= page.clientWidth + 1) };
        """,
        width=width,
    )
    assert found == {"wide": width, "needs": width, "charts": True}
