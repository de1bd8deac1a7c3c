"""The page: self-contained, and usable in a browser."""

import base64
import html
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

import gshard
from tests.mt.browser import act, open_page


def fn(x, w):
    x = gshard.split(x, 0, 8)
    h = jnp.tanh(x @ gshard.split(w, 1, 8))
    h = gshard.split(h, 1, 8)

    def body(carry, _):
        return jnp.sin(carry) @ jnp.ones((128, 128)), None

    return jax.lax.scan(body, h, None, length=3)[0]


@pytest.fixture(scope="module")
def lowered():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 128))]
    return gshard.jit(fn, devices=8).lower(*shapes)


@pytest.fixture(scope="module")
def explanation(lowered):
    return lowered.explain("h100", seconds=math.inf)


@pytest.fixture(scope="module")
def path(lowered, explanation, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    growth = {n: lowered.forecast("h100") for n in (4, 8, 16)}
    path.write_text(explanation.page(growth), encoding="utf-8")
    return path


def test_the_page_asks_for_nothing_from_elsewhere_and_is_small(path):
    text = path.read_text(encoding="utf-8")
    assert "Content-Security-Policy" in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?http", text)
    assert len(text) < 300_000


def test_text_of_the_user_stays_text(tmp_path):
    """A name that is markup, in the source, the cards, the tensors and the data."""
    lines = [
        "import gshard, jax.numpy as jnp",
        "def fn(x):",
        "    y = gshard.replicate(gshard.split(x, 0, 4))  # <script>alert(1)</script></b>",
        "    return y",
    ]
    file = tmp_path / "evil.py"
    file.write_text("\n".join(lines), encoding="utf-8")
    space = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), space)
    lowered = gshard.jit(space["fn"], devices=4).lower(jax.ShapeDtypeStruct((8, 8), "float32"))
    page = lowered.explain("h100", seconds=0).page()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page


def test_the_page_opens_without_errors_and_answers_first(path, explanation, tmp_path):
    document, console = open_page(path, tmp_path)
    assert console == []
    assert f"<h1>{explanation.bounds}</h1>\n<p>{explanation.sentence}</p>" in document
    assert "8 x h100" in document
    assert "test_page.py" in document
    order = [document.index(part) for part in ("takes the most time", "Your source", "Sums")]
    assert order == sorted(order)
    assert document.count('<details class="fold"') == 5
    assert '<details class="fold" id="sums" open' not in document


def test_the_first_screen_has_lines_fixes_tensors_and_the_source(path, explanation, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        return { cards: all(".card").map((c) => c.innerText),
          tensors: all(".tensor").map((t) => t.querySelector("b").textContent),
          margin: all(".src.sends").map((r) => r.innerText),
          top: one("#source-title").getBoundingClientRect().top };
        """,
    )
    costs = explanation.lines[:3]
    assert len(said["cards"]) == len(costs)
    found = explanation.search()
    for card, cost in zip(said["cards"], costs, strict=True):
        assert cost.name in card
        assert explanation.why(cost) in card
        fix = found.for_line(cost.name, cost.sent)
        assert fix.change in card if fix else "None of" in card
    assert {"x", "w", "h"} <= set(said["tensors"])
    assert len(said["margin"]) == len(explanation.lines)
    assert said["top"] < 800


def test_a_line_tells_what_runs_there_by_click_and_by_key(path, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        const row = one(".src.sends");
        row.click();
        const clicked = one("#detail").innerText, marked = row.classList.contains("chosen");
        document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
        const closed = one("#detail").hidden;
        row.focus();
        row.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
        const next = document.activeElement;
        next.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
        return { clicked, marked, closed, moved: next !== row && next.classList.contains("runs"),
          keyed: one("#detail b").textContent.startsWith(next.dataset.line) };
        """,
    )
    assert "each device sends" in said["clicked"]
    assert "because:" in said["clicked"]
    assert said["marked"]
    assert said["closed"]
    assert said["moved"]
    assert said["keyed"]


def test_sums_agree_with_the_forecast_and_can_be_searched_and_sorted(path, explanation, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        one("#sums").open = true;
        one("#sums").dispatchEvent(new Event("toggle"));
        const rows = () => all("#sum-table tbody tr").map((r) => r.cells[0].textContent);
        const sums = one("#sum-found").textContent, all_rows = rows();
        type("#sum-find", "test_page");
        const found = rows();
        type("#sum-find", "");
        press("#sum-table", "sent");
        const first = rows()[0];
        type("#sum-by", "kind");
        return { sums, all_rows, found, first, kinds: rows() };
        """,
    )
    from gshard.graph.readable import size

    lines = {t.source for t in explanation.forecast.operators}
    assert len(said["all_rows"]) == len(lines)
    assert f"{size(explanation.forecast.sent_bytes)} sent in all" in said["sums"]
    assert all("test_page" in row for row in said["found"])
    by_sent = max(
        lines,
        key=lambda s: sum(
            t.sent * t.count for t in explanation.forecast.operators if t.source == s
        ),
    )
    assert said["first"] == by_sent
    assert {c.name for c in explanation.kinds} <= set(said["kinds"])


def test_a_loop_folds_and_says_what_it_takes(path, explanation, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        one("#program").open = true;
        one("#program").dispatchEvent(new Event("toggle"));
        const seen = () => all("#ops .op").filter((row) => row.checkVisibility());
        const before = seen().length, inside = all("#ops .loop .op").length;
        one("#fold").click();
        const folded = seen().length, head = one("#ops .loop summary").textContent;
        seen()[0].focus();
        for (let n = 0; n < before; n++) document.activeElement.dispatchEvent(
          new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
        const stopped = document.activeElement.tagName;
        one("#unfold").click();
        return { before, inside, folded, head, stopped, after: seen().length };
        """,
    )
    loop = [t for t in explanation.forecast.operators if t.loops]
    assert said["inside"] == len(loop) > 0
    assert said["folded"] == said["before"] - said["inside"]
    assert said["after"] == said["before"] == len(explanation.forecast.operators)
    assert f"{len(loop)} operators" in said["head"]
    assert said["stopped"] == "SUMMARY"  # arrows reach the loop, which Enter unfolds


def test_the_program_nests_loops_and_filters(path, explanation, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        one("#program").open = true;
        one("#program").dispatchEvent(new Event("toggle"));
        const count = () => all(".op").length;
        const every = count(), loops = all(".loop").map((l) => l.textContent);
        one("#only").click();
        const sends = count();
        one("#only").click();
        type("#op-order", "seconds");
        const times = all(".op").map((o) => o.firstElementChild.textContent);
        type("#op-find", "sin");
        return { every, loops, sends, first: times[0], sins: count(), flat: all(".loop").length };
        """,
    )
    operators = explanation.forecast.operators
    assert said["every"] == len(operators)
    assert any("scan x 3" in loop for loop in said["loops"])
    assert said["sends"] == sum(bool(t.collective) for t in operators)
    assert 0 < said["sins"] < said["every"]
    assert said["flat"] == 0  # in the order of time there is no nesting


def test_operators_have_the_names_of_the_code_and_are_found_by_them(path, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        one("#program").open = true;
        one("#program").dispatchEvent(new Event("toggle"));
        const cells = (row) => [...row.children].map((cell) => cell.textContent);
        const every = all(".op").map(cells);
        type("#op-find", "jnp.sin");
        const found = all(".op").map(cells);
        all(".op")[0].click();
        return { every, found, detail: one("#detail").innerText,
          held: all(".held li").map((item) => item.textContent) };
        """,
    )
    named = {cells[3] for cells in said["every"]}
    assert {"w", "x @ gshard.split(w, 1, 8)"} & named
    assert all("jnp.sin(carry)" in cells[3] for cells in said["found"])
    assert said["found"]
    assert "jnp.sin(carry)" in said["detail"]
    assert any("jnp.sin(carry)" in item for item in said["held"])


@pytest.mark.slow
def test_memory_has_axes_and_says_what_is_under_the_pointer(path, explanation, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        one("#memory").open = true;
        one("#memory").dispatchEvent(new Event("toggle"));
        const box = one("#memory-chart"), frame = box.getBoundingClientRect();
        const move = (kind, at) => box.dispatchEvent(new PointerEvent(kind, { bubbles: true,
          clientX: frame.left + at * frame.width, clientY: frame.top + 80 }));
        move("pointermove", .5);
        const tip = one("#tip").innerText;
        box.dispatchEvent(new MouseEvent("click", { bubbles: true,
          clientX: frame.left + .5 * frame.width, clientY: frame.top + 80 }));
        const axis = all("#memory-chart .wide text").map((t) => t.textContent);
        return { tip, axis, detail: one("#detail b").textContent };
        """,
    )
    assert re.search(r"operator \d+ of \d+", said["tip"])
    assert "operators" in said["axis"]
    assert any("on a device" in text for text in said["axis"])
    assert re.search(r"test_page\.py:\d+: ", said["detail"])


@pytest.mark.slow
def test_charts_are_drawn_with_powers_of_two(path, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        one("#time").open = true;
        return { growth: all("#growth-chart .wide text").map((t) => t.textContent),
          rows: all("#time-chart .wide text").map((t) => t.textContent) };
        """,
    )
    assert {"4", "8", "16", "devices"} <= set(said["growth"])
    assert {"forecast", "at the roofline", "fn"} <= set(said["rows"])


@pytest.mark.parametrize("width", [360, pytest.param(768, marks=pytest.mark.slow)])
def test_narrow_windows_do_not_scroll_sideways(path, tmp_path, width):
    found = act(
        path,
        tmp_path,
        """
        all("details").forEach((fold) => {
          fold.open = true;
          fold.dispatchEvent(new Event("toggle"));
        });
        const page = document.documentElement;
        return { wide: page.clientWidth, needs: page.scrollWidth };
        """,
        width=width,
    )
    assert found == {"wide": width, "needs": width}


def test_a_notebook_shows_five_lines_and_a_link_to_the_page(lowered):
    shown = lowered._repr_html_()
    assert shown.count("<br>") == 4
    page = base64.b64decode(re.search(r"base64,([^\"]+)", shown)[1]).decode()
    assert page.startswith("<!DOCTYPE html>")
    assert len(re.sub(r"base64,[^\"]+", "", shown)) < 1000


def test_an_explanation_shows_a_table_of_lines(explanation):
    shown = explanation._repr_html_()
    assert shown.count("<tr>") == 1 + min(6, len(explanation.lines))
    assert html.escape(explanation.sentence) in shown


def test_a_trace_holds_the_whole_step(lowered):
    from gshard.forecast.report import trace

    forecast = lowered.forecast("h100")
    events = json.loads(json.dumps(trace(forecast)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(forecast.operators)
    assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * forecast.step_seconds)
    assert {e["tid"] for e in slices} == {1, 2}


@pytest.mark.slow
def test_the_page_of_600_billion_weights_opens_folded_and_can_be_searched(tmp_path):
    """1,730 operators: the page is small, and loops are folded so that it can be surveyed."""
    from gshard.models.family import plan

    lowered = plan("moe_2048e_36l").lowered("tpu-v3")
    page = tmp_path / "page.html"
    page.write_text(lowered.page("tpu-v3"), encoding="utf-8")
    operators = len(lowered.forecast("tpu-v3").operators)
    assert len(page.read_text(encoding="utf-8")) < 1_000_000
    said = act(
        page,
        tmp_path,
        """
        one("#program").open = true;
        one("#program").dispatchEvent(new Event("toggle"));
        const seen = () => all("#ops .op").filter((row) => row.checkVisibility()).length;
        const every = all("#ops .op").length, folded = seen();
        const inside = all("#ops .loop .op").length;
        one("#unfold").click();
        const unfolded = seen();
        type("#op-find", "mask_GSEC");
        return { every, folded, inside, unfolded, found: seen(),
          unnamed: all("#ops .op").filter((row) => !row.children[3].textContent).length };
        """,
    )
    assert said["every"] == said["unfolded"] == operators > 1000
    assert said["folded"] == operators - said["inside"] < operators
    assert 0 < said["found"] < operators / 10
    assert said["unnamed"] == 0
