"""The `gshard` command: every subcommand is a small module of `gshard.commands`.

Mistakes of the user are raised as `UserError` and printed in one line, without a traceback. The
exit status is 1 or 2 for those, 75 for hosts that did not connect, and 70 for an internal error.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

try:
    import typer
except ImportError:
    sys.exit("the gshard command needs more packages: pip install 'gshard[cli]'")

import gshard
from gshard.commands import data, release, train
from gshard.commands.options import PlainCommand, PlainGroup
from gshard.errors import UserError
from gshard.untrusted import printable_lines

# Errors of the operating system that a user can fix.
_NOT_OURS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO,
)  # fmt: skip

# In sysexits.h: "internal software error", and "temporary failure" (other processes are missing).
_UNFORESEEN, _TEMPORARY = 70, 75

_PROGRAMS = "Any JAX program"
_TRANSLATION = "Translation (needs the extra mt)"

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Partition annotated JAX programs, and train multilingual translation with them.",
)
app.add_typer(data.app, name="data", rich_help_panel=_TRANSLATION)
_MODULES = {  # of commands that share one
    **dict.fromkeys(("explain", "compare", "auto", "fits", "profile"), "programs"),
    "interval": "forecast",
    "report": "study",
}
for _panel, _names in (
    (_PROGRAMS, "explain compare auto fits forecast profile interval doctor"),
    (_TRANSLATION, "train evaluate translate serve report study release"),
):
    for _name in _names.split():
        _module = importlib.import_module(f"gshard.commands.{_MODULES.get(_name, _name)}")
        app.command(cls=PlainCommand, rich_help_panel=_panel)(getattr(_module, _name))
app.command("import", cls=PlainCommand, rich_help_panel=_TRANSLATION)(release.import_)
app.command(cls=PlainCommand, rich_help_panel=_TRANSLATION, context_settings=train.LAUNCH)(
    train.launch
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gshard {gshard.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; never returns."""
    try:
        app(arguments, standalone_mode=True)
    except UserError as error:
        _fail(str(error), error.status, error.at_once)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(
                "the disk is full; no incomplete file is left: make room and run the same command "
                "again to continue"
            )
        if error.errno == errno.EFBIG:
            _fail(
                "a file would be larger than this process may write (`ulimit -f` shows how large); "
                "no incomplete file is left"
            )
        if error.errno not in _NOT_OURS or error.filename is None:
            _break_down(error)
        _fail(f"{error.filename}: {error.strerror}")
    except ModuleNotFoundError as error:
        package = (error.name or "gshard").split(".")[0]
        if package == "gshard":
            _break_down(error)
        extra = "plots" if package in ("jinja2", "markupsafe", "vl_convert") else "mt"
        extra = "ray" if package == "ray" else extra
        extra = "export" if package in ("ctranslate2", "torch", "transformers") else extra
        _fail(f"this needs the package {package!r}: pip install 'gshard[{extra}]'")
    except SystemExit as error:
        if error.code in (1, 2):
            _leave(int(error.code), "it was interrupted")
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            first = (str(error).strip().splitlines() or ["no memory is left"])[0]
            _fail(f"this does not fit in memory: {first[:200]}")
        _break_down(error)


def _others() -> tuple[Any, bool]:
    """The other processes of this command, if it has any, and whether a supervisor watches it.

    A command that has not loaded translation runs alone.
    """
    if "gshard.mt.launch.company" not in sys.modules:
        return None, False
    from gshard.mt.launch import company, status

    return company.current(), status.is_watched()


def _fail(message: str, code: int = 1, at_once: bool = False) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(f"gshard: {printable_lines(message)}", file=sys.stderr)
    _leave(code, message, at_once)


def _break_down(error: Exception) -> NoReturn:
    others, watched = _others()
    if others and not watched and (sentence := others.missed(error)):
        _fail(sentence, _TEMPORARY, at_once=True)
    traceback.print_exc()
    _leave(_UNFORESEEN, f"{type(error).__name__}: {error}")


def _leave(code: int, words: str, at_once: bool = False) -> NoReturn:
    """Exit; at once where JAX would first wait for processes that died or never connected."""
    others, watched = _others()
    if others and not watched and not at_once:
        others.part(words)
    if at_once or others or watched:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
