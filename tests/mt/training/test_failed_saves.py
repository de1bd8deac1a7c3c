import asyncio
import gc
import logging
import sys
import types

import pytest

from gshard.mt.training import agreement


@pytest.fixture
def shown(monkeypatch):
    """What is shown of exceptions that nobody can catch."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    agreement.silence_orbax_after_failure()
    yield found
    logging.getLogger("asyncio").removeFilter(agreement._is_heard)


def test_only_what_a_closed_loop_raises_is_left_out(shown):
    errors = RuntimeError("Event loop is closed"), RuntimeError("other"), OSError("no")
    for error in errors:
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))
    assert [each.exc_value for each in shown] == list(errors[1:])


def test_tasks_that_nobody_waits_for_fail_in_silence(shown, caplog):
    async def write():
        raise OSError("no space left")

    async def save():
        asyncio.ensure_future(write())  # noqa: RUF006
        await asyncio.sleep(0)

    asyncio.run(save())
    gc.collect()
    logging.getLogger("asyncio").error("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
