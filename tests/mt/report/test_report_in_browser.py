"""The report in a real browser: drawn, sorted, filtered, switched, on screens of all widths."""

import math
import re

import pytest

from tests.mt.browser import act, open_page
from tests.mt.report import made_up_runs
from tests.mt.report.made_up_runs import LANGUAGES
from tests.mt.report.page_reader import lines, read


def test_in_a_browser(path, tmp_path):
    """The page as it is, its policy in force: no complaint, every chart drawn."""
    document, console = open_page(path, tmp_path)
    assert console == []
    for chart in ("corpora", "health-overflow"):
        assert re.search(rf'id="{chart}"[^>]*><div [^>]*><svg', document), chart
    for figure, drawn in (("loss-chart", 3), ("quality-chart", 2)):
        inside = re.search(rf'id="{figure}">(.*?)</figure>', document, re.DOTALL)[1]
        assert inside.count("<svg") == 2 * drawn  # for wide and for narrow screens
    assert "German" in document


def test_charts_have_their_points(path, tmp_path):
    """Of what is shown at first; a dot is an arc, and a line has a point after each letter."""
    found = act(
        path,
        tmp_path,
        """
        const shown = (box) => all(`${box} .wide path`).filter((each) =>
          !each.closest("[hidden]") && !each.closest(".mark-rule, .role-axis, .role-legend"));
        const dots = (box) => shown(box).filter((each) =>
          each.getAttribute("d").includes("A")).length;
        const lines = (box, dashed, faint) => shown(box).filter((each) =>
          each.closest(".mark-line") && each.hasAttribute("stroke-dasharray") === dashed
            && (each.getAttribute("opacity") === "0.3") === faint)
          .map((each) => each.getAttribute("d").split(/[ML]/).length - 1);
        return {
          corpora: dots("#corpora"),
          gains: dots("#quality-chart"),
          smooth: lines("#quality-chart", false, false),
          loss: lines("#loss-chart", false, false),
          raw: lines("#loss-chart", false, true),
          dev: lines("#loss-chart", true, false),
          heat: all("#heat td").length,
          health: all(".grid-of-charts svg").length,
          labelled: all(".chart").every((each) => each.getAttribute("aria-label")),
          inputs: all("input, select").every((each) => each.closest("label")),
        };
        """,
    )
    assert found == {
        "corpora": 106,
        "gains": 106 + 105,
        "smooth": [106, 105],
        "loss": [500, 500, 210, 150],
        "raw": [500, 500, 210, 150],
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
        const cell = (n, e) => all("#heat tbody tr")[e].cells[n + 1];
        const tell = (n, e) => point(cell(n, e), 2, 2);
        const told = { "encoder 0": tell(3, 5) };
        press("#heat-controls", "2");
        told["encoder 1"] = tell(3, 5);
        press("#heat-controls", "decoder");
        told["decoder 1"] = tell(3, 5);
        const column = Array.from({ length: 16 }, (_, e) => cell(3, e));
        return { told, text: column.map((each) => each.textContent),
          heat: column.map((each) => parseFloat(each.style.getPropertyValue("--v"))) };
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
    shown = experts["decoder"]["de-en"][1]
    assert found["text"] == [f"{100 * round(x, 4):.1f}%" for x in shown]
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
        const shown = (id) => all(`${id} .chart`).find((each) => !each.closest("[hidden]"));
        const end = (id) => point(shown(id), shown(id).clientWidth - 60, 100);
        const tokens = end("#loss-chart");
        press("#loss-controls", "steps");
        const steps = end("#loss-chart");
        press("#loss-controls", "time of training");
        const time = end("#loss-chart");
        const text = [...shown("#loss-chart").querySelectorAll("text")].map((each) =>
          each.textContent);
        const quality = shown("#quality-chart");
        for (let n = 0; n < 4; n++)
          quality.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        const german = one("#tip").innerText;
        press("#quality-controls", "BLEU");
        const bleu = [...shown("#quality-chart").querySelectorAll("text")].map((each) =>
          each.textContent);
        return { tokens, steps, time, text, german, bleu, corpus: point(one("#corpora"), 60, 40) };
        """,
    )
    last = lines(runs[0], "train")[-1]
    assert "24.6M target tokens" in found["tokens"]
    assert last["tokens"] == 24_600_000
    assert "12k steps" in found["steps"]
    assert f"{lines(runs[0], 'dev')[-1]['nll']:.2f}" in found["steps"]
    assert " min\n" in found["time"]
    assert "minutes" in found["text"]
    tasks = read(runs[0], "evaluation.json")["tasks"]
    base = read(runs[0], "baselines.json")["tasks"]
    gain = tasks["de-en"]["bleu"] - base["de-en"]["bleu"]
    assert f"German (de), {tasks['de-en']['train_pairs']:,} pairs" in found["german"]
    assert f"+{gain:.1f}" in found["german"]
    assert "copy of source" in found["bleu"]
    assert "baselines" in found["bleu"]
    assert "Portuguese (pt)" in found["corpus"]
    assert f"{made_up_runs.pairs(0):,} pairs" in found["corpus"]


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
