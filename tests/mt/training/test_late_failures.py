import sys
import types

from gshard.mt.training import late_failures


def test_only_what_a_closed_loop_raises_is_left_out(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    late_failures.leave_out()
    errors = RuntimeError("Event loop is closed"), RuntimeError("other"), OSError("no")
    for error in errors:
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))
    assert [each.exc_value for each in shown] == list(errors[1:])
