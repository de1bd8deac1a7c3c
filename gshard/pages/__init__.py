"""Pages and plots in one style: templates that escape, charts that a library draws, one file each.

Jinja2 fills templates in. Vega-Lite (`vl-convert-python`) draws charts, as SVG when the page is
made: so pages stay small, fetch nothing, and the same charts are files of plots.
"""

from gshard.pages.charts import Chart, bars
from gshard.pages.curves import ChartAxis, Series, area, curves, lines
from gshard.pages.template import checked, render, style

__all__ = [
    "Chart",
    "ChartAxis",
    "Series",
    "area",
    "bars",
    "checked",
    "curves",
    "lines",
    "render",
    "style",
]
