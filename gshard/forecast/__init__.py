"""Forecasts of a partitioned program's time and memory on hardware that you need not have."""

from gshard.forecast.hardware import Efficiency, Hardware, hardware, known, present
from gshard.forecast.memory import Memory
from gshard.forecast.report import Forecast, forecast
from gshard.forecast.time import Timed
from gshard.forecast.topology import Network, Switch, Torus

__all__ = [
    "Efficiency",
    "Forecast",
    "Hardware",
    "Memory",
    "Network",
    "Switch",
    "Timed",
    "Torus",
    "forecast",
    "hardware",
    "known",
    "present",
]
