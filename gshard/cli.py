"""The `gshard` command: every subcommand is a small module that registers here.

Modules of commands import nothing heavy at their top, so that `--help` answers at once. What a
user can mend is raised as `UserError` and printed without a traceback; the exit status says so:
1 and 2 for that, 75 for hosts that did not come, 70 for what nobody foresaw.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

try:
    import typer
except ImportError:
    sys.exit("the gshard command needs more packages: pip install 'gshard[mt]'")

from gshard.mt.commands import (
    data,
    evaluate,
    launch,
    release,
    report,
    serve,
    study,
    train,
    translate,
)
from gshard.mt.errors import UserError
from gshard.mt.launch import status
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
    errno.ENXIO,
)

_UNFORESEEN = 70  # "internal software error" of sysexits.h

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
app.command()(study.study)
app.command()(release.release)
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
        _fail(str(error), error.status, error.at_once)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(
                "the disk is full; nothing half-written is left, and running the same command "
                "again after making room continues"
            )
        if error.errno == errno.EFBIG:
            _fail(
                "a file would be larger than this process may write (`ulimit -f` shows how large); "
                "nothing half-written is left"
            )
        if error.errno not in _NOT_OURS or error.filename is None:
            _break_down()
        _fail(f"{error.filename}: {error.strerror}")
    except Exception as error:  # a lost host is one of XLA's errors
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            first = (str(error).strip().splitlines() or ["no memory is left"])[0]
            _fail(f"this does not fit in memory: {first[:200]}")
        _break_down()


def _fail(message: str, code: int = 1, at_once: bool = False) -> NoReturn:
    print(f"gshard: {message}", file=sys.stderr)
    _leave(code, at_once)


def _break_down() -> NoReturn:
    traceback.print_exc()
    _leave(_UNFORESEEN)


def _leave(code: int, at_once: bool = False) -> NoReturn:
    """Exit; at once where JAX would first wait for processes that died or never came."""
    if at_once or status.VARIABLE in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
