"""The page: self-contained, and usable in a browser."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

import gshard
from tests.mt.browser import act, open_page


@pytest.fixture(scope="module")
def lowered():
    def fn(x, w):
        x = gshard.split(x, 0, 8)
        h = jnp.tanh(x @ gshard.split(w, 1, 8))
        return gshard.split(h, 1, 8)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 128))]
    return gshard.jit(fn, devices=8).lower(*shapes)


@pytest.fixture(scope="module")
def path(lowered, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(lowered.page("h100"), encoding="utf-8")
    return path


def test_the_page_asks_for_nothing_from_elsewhere(path):
    text = path.read_text(encoding="utf-8")
    assert "Content-Security-Policy" in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?http", text)


def test_the_page_opens_without_errors_and_shows_the_program(path, tmp_path):
    document, console = open_page(path, tmp_path)
    assert console == []
    assert document.count('class="op"') >= 3
    assert "test_page.py" in document
    assert "8 x h100" in document


def test_a_click_on_a_collective_says_where_it_comes_from(path, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        const row = all(".op").find((r) => r.querySelector(".link"));
        row.click();
        return { detail: one("#detail").textContent, marked: all(".chosen").length };
        """,
    )
    assert "each device sends" in said["detail"]
    assert "because:" in said["detail"]
    assert re.search(r"from .*test_page\.py:\d+", said["detail"])
    assert said["marked"] == 2  # the operator and its line of source


def test_collectives_alone_and_grids(path, tmp_path):
    said = act(
        path,
        tmp_path,
        """
        one("#only").click();
        const shown = all(".op").filter((r) => !r.hidden).length;
        return { shown, all: all(".op").length, grids: all(".grid canvas").length };
        """,
    )
    assert 0 < said["shown"] < said["all"]
    assert said["grids"] >= 3


def test_plots_of_memory_breakdown_collectives_and_growth(lowered, tmp_path):
    forecast = lowered.forecast("h100")
    path = tmp_path / "page.html"
    path.write_text(lowered.page("h100", {4: forecast, 8: forecast}), encoding="utf-8")
    said = act(
        path,
        tmp_path,
        """
        const drawn = all("svg.chart").map((c) => c.getBoundingClientRect());
        return { titles: all("svg.chart text:first-child").map((t) => t.textContent),
          seen: drawn.filter((box) => box.width > 200 && box.height > 100).length };
        """,
    )
    assert said["seen"] == 4
    for title, wanted in zip(
        said["titles"], ("memory per device", "roofline", "collectives", "step time"), strict=True
    ):
        assert wanted in title


def test_a_notebook_shows_the_page_in_a_frame(lowered):
    assert lowered._repr_html_().startswith("<iframe srcdoc=")


def test_a_trace_holds_the_whole_step(lowered):
    from gshard.forecast.trace import trace

    forecast = lowered.forecast("h100")
    events = json.loads(json.dumps(trace(forecast)))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(forecast.operators)
    assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * forecast.step_seconds)
    assert {e["tid"] for e in slices} == {1, 2}
