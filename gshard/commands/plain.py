"""Help that names the types of options as people write them: PATH and NUMBER, nothing for flags."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_SHOWN = {"bool": "", "str": "TEXT", "int": "NUMBER", "float": "NUMBER"}
_TYPE = re.compile(r"<(?:list\[)?(\w+)(?: range)?\]?>")


class PlainCommand(TyperCommand):
    """A command with such help."""

    def get_params(self, ctx: Any) -> Any:
        """Arguments and options, `--help` included."""
        found = super().get_params(ctx)
        for param in found:
            if hasattr(param, "display_type"):  # older Typers have Click's names: no `<bool>`
                shown = _TYPE.sub(_plain, param.display_type(ctx))
                param.display_type = lambda ctx, shown=shown: shown
        return found


def _plain(match: re.Match[str]) -> str:
    return _SHOWN.get(match[1], match[1].upper())
