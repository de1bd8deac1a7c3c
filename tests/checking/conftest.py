"""Faults that tests plant into the partitioner."""

import importlib

import pytest

emission = importlib.import_module("gshard.improve.expand")


@pytest.fixture
def plant(monkeypatch):
    """A change of the partitioner; code that emission has made before is forgotten."""

    def change(*args):
        monkeypatch.setattr(*args)
        emission._expansion.cache_clear()

    yield change
    monkeypatch.undo()
    emission._expansion.cache_clear()
