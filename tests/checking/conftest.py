"""Faults that tests plant into the partitioner."""

import pytest

from gshard.moving.nodes import code_of


@pytest.fixture
def plant(monkeypatch):
    """A change of the partitioner; code of nodes that was made before is forgotten."""

    def change(*args):
        monkeypatch.setattr(*args)
        code_of.cache_clear()

    yield change
    monkeypatch.undo()
    code_of.cache_clear()
