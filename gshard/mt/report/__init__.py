"""`gshard report`: one HTML page that shows what runs learned, from their folders alone.

`gathered` reads the folders, `measures` does the arithmetic, `charts` and `tables` make what is
shown, and `page` fills in the templates. Style, charts and templates are those of `gshard.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.report.gathered import Gathered, gather
from gshard.mt.report.page import render

NAME = "report.html"


def write_report(
    folders: Sequence[str | Path], out: str | Path | None = None
) -> tuple[Path, list[Gathered]]:
    """Write the page; where it is, and the runs it shows.

    One run keeps its report in its own folder; several together have theirs where the user is.
    """
    runs = gather(folders)
    if not runs:
        raise UserError("name at least one run")
    path = Path(out) if out else (runs[0].folder if len(runs) == 1 else Path()) / NAME
    if path.is_dir():
        path = path / NAME
    page = render(runs)
    try:
        with atomic.new_file(path) as part:
            part.write_bytes(page.encode("utf-8", "replace"))  # half a surrogate pair becomes "?"
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return path, runs
