"""Stable names stay: what docs/reference/stability.md lists is in the code."""

import importlib

import pytest

import gshard
from tools import stability

TEXT = stability.PAGE.read_text()


@pytest.mark.parametrize("module", [*stability.MODULES, "gshard.contrib.equinox"])
def test_every_stable_name_is_there(module):
    listed = stability.listed(TEXT)[module]
    assert listed
    missing = {name for name in listed if not hasattr(importlib.import_module(module), name)}
    assert not missing, "a stable name is deprecated first: see docs/reference/stability.md"


def test_every_stable_command_is_there():
    listed = stability.listed(TEXT)["commands"]
    assert {"explain", "forecast", "train", "data gather"} <= listed
    assert listed <= set(stability.commands())


def test_the_page_can_be_updated():
    """With the names of today, and without a change to anything else."""
    found = stability.updated(TEXT)
    assert stability.listed(found)["gshard"] == set(gshard.__all__) - {"__version__"}
    assert stability.listed(found)["commands"] == set(stability.commands())
    assert stability.updated(found) == found


def test_a_name_that_is_gone_is_noticed():
    changed = TEXT.replace("`jit`, `manual`", "`jit`, `jit_of_old`, `manual`")
    assert changed != TEXT
    gone = stability.listed(changed)["gshard"] - set(gshard.__all__)
    assert gone == {"jit_of_old"}
