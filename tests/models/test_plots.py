"""Plots of forecasts: SVG files in the style of the pages, with powers of two on the axis."""

import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import gshard
from benchmarks.forecast_scale import plot
from gshard.models.plots import plot_forecast, plot_growth
from gshard.pages import bars


def step(x, w):
    with jax.named_scope("feed_forward"):
        return jnp.tanh(gshard.split(x, 0, 8) @ gshard.split(w, 0, 8))


@pytest.fixture(scope="module")
def forecast():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 16))]
    return gshard.jit(step, devices=8).lower(*shapes).forecast("tpu-v3")


def texts(path):
    """The texts of a drawing that follows the reader's theme by the pages' own colours."""
    drawing = path.read_text(encoding="utf-8")
    assert drawing.startswith("<svg")
    assert "prefers-color-scheme" in drawing
    assert "var(--" in drawing
    return {text for text in ET.fromstring(drawing).itertext() if text.strip()}


def test_growth_has_powers_of_two_on_its_axis(forecast, tmp_path):
    step_time, collectives = plot_growth(dict.fromkeys((8, 16, 32), forecast), tmp_path, "a model")
    assert {"8", "16", "32", "devices", "a model: time of a step"} <= texts(step_time)
    assert {"16", "256", "2048", "all_to_all", "8 MiB collectives on tpu-v3"} <= texts(collectives)


def test_a_forecast_has_its_breakdown_and_memory(forecast, tmp_path):
    breakdown, memory = plot_forecast(forecast, tmp_path, "a model")
    assert {"forecast", "at the roofline"} <= texts(breakdown)
    assert any("on a device" in text for text in texts(memory))


def test_the_plots_of_scaling_have_the_numbers_of_devices(tmp_path):
    seconds, equations = plot({8: (6.4, 8198), 32: (5.8, 8187), 128: (6.6, 8222)}, tmp_path)
    assert {"8", "32", "128", "seconds to partition"} <= texts(seconds)
    assert {"8", "32", "128", "equations"} <= texts(equations)


def test_the_title_of_a_saved_chart_is_inside_of_it(tmp_path):
    drawn = (
        bars("A title", {"row": [("a", 1.0, "1"), ("b", 2.0, "2")]})
        .save(tmp_path / "a.svg")
        .read_text()
    )
    shifted = r"translate\([-\d.]+,([-\d.]+)\)"
    (top,) = re.search(rf'<g fill="none"[^>]* transform="{shifted}"', drawn).groups()
    of_title = re.search(rf'role-title"><g transform="{shifted}".*?transform="{shifted}"', drawn)
    assert float(top) + sum(map(float, of_title.groups())) >= 15  # letters of 15 above this line
