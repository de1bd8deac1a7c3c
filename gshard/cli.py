"""The `gshard` command: every subcommand is a small module that registers here.

Modules of commands import nothing heavy at their top, so that `--help` answers at once. What a
user can mend is raised as `UserError` and printed without a traceback; the exit status says so.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

try:
    import typer
except ImportError:
    sys.exit("the gshard command needs more packages: pip install 'gshard[mt]'")

from gshard.mt.commands import data, evaluate, launch, report, serve, train, translate
from gshard.mt.errors import UserError
from gshard.planning import commands as planning

# What a machine refuses, and a user can mend.
_NOT_OURS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EIO,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Massively multilingual translation with mixtures of experts.",
)
app.add_typer(data.app, name="data")
app.command()(train.train)
app.command(context_settings=launch.SETTINGS)(launch.launch)
app.command()(evaluate.evaluate)
app.command()(translate.translate)
app.command()(serve.serve)
app.command()(report.report)
app.command()(planning.forecast)
app.command()(planning.explain)
app.command()(planning.interval)


@app.callback()
def _root() -> None:
    """Keep `gshard data` a subcommand even while it is the only one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; never returns."""
    try:
        app(arguments, standalone_mode=True)
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(
                "the disk is full; nothing half-written is left, and running the same command "
                "again after making room continues"
            )
        if error.errno not in _NOT_OURS or error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}")


def _fail(message: str) -> None:
    print(f"gshard: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
