"""Arguments and options that several commands share, with their shell completions and types.

Some say which process of how many this is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from gshard.mt.launch.environment import Hosts


def _beginning(known: Iterable[str], typed: str) -> list[str]:
    return [name for name in known if name.startswith(typed)]


def complete_hardware(incomplete: str) -> list[str]:
    """Names of hardware, and TOML files."""
    from gshard.forecast import known

    return _beginning([*known(), *map(str, Path().glob("*.toml"))], incomplete)


def complete_models(incomplete: str) -> list[str]:
    """Members of the paper's family."""
    from gshard.nn.family import FAMILY

    return _beginning(FAMILY, incomplete)


def complete_runs(incomplete: str) -> list[str]:
    """Folders of runs, here and below `runs`."""
    from gshard.mt.run import CONFIG

    folder = Path(incomplete).parent
    found = [*folder.glob(f"*/{CONFIG}"), *Path("runs").glob(f"*/{CONFIG}")]
    return _beginning(sorted({str(path.parent) for path in found}), incomplete)


def complete_what_to_train(incomplete: str) -> list[str]:
    """Presets, configuration files and runs."""
    from gshard.mt.presets import PRESETS

    files = sorted(map(str, Path().glob("*.toml")))
    return [*_beginning([*PRESETS, *files], incomplete), *complete_runs(incomplete)]


def complete_tiers(incomplete: str) -> list[str]:
    """Tiers of data, and TOML files."""
    from gshard.mt.data.tiers import shipped

    return _beginning([*shipped(), *map(str, Path().glob("*.toml"))], incomplete)


_HARDWARE = "a name such as h100, or a TOML file, to plan and forecast for"

Model = Annotated[str, typer.Argument(help="a model of the paper", autocompletion=complete_models)]
HardwareOfPaper = Annotated[str, typer.Option(help=_HARDWARE, autocompletion=complete_hardware)]
Hardware = Annotated[
    str | None,
    typer.Option(help=_HARDWARE, show_default="what JAX reports", autocompletion=complete_hardware),
]
Shapes = Annotated[
    list[str] | None, typer.Argument(help="shapes of its arguments, as in f32[8,256,128]")
]
Arguments = Annotated[
    str | None, typer.Option(help="module:function that returns the arguments, for pytrees")
]
DevicesOfPaper = Annotated[
    int | None, typer.Option(help="number of devices", show_default="as many as the paper's", min=1)
]
Run = Annotated[Path, typer.Argument(help="a run, or a release", autocompletion=complete_runs)]
Runs = Annotated[
    list[Path], typer.Argument(help="folders of runs, shown together", autocompletion=complete_runs)
]
Page = Annotated[Path | None, typer.Option(help="an HTML file of the explained program")]
Plots = Annotated[Path | None, typer.Option(help="a folder for plots")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Checkpoint = Annotated[str, typer.Option(help="best, last, or a step")]
Beam = Annotated[int, typer.Option(help="hypotheses kept while searching; 1 is greedy", min=1)]
Alpha = Annotated[float, typer.Option(help="length penalty: higher prefers longer translations")]
Rows = Annotated[int, typer.Option(help="sentences translated together, at most", min=1)]
Engine = Annotated[
    str, typer.Option(help="inference engine: auto, onnx (ONNX Runtime on a CPU), or xla")
]
Weights = Annotated[
    str, typer.Option(help="precision of the weights: float32 or int8", show_default="as released")
]
Threads = Annotated[int, typer.Option(help="threads of --engine onnx; 0: one per core", min=0)]
Devices = Annotated[int, typer.Option(help="devices to use; 0 means all, or one CPU", min=0)]
Languages = Annotated[
    str, typer.Option(help="only these languages, separated by commas", show_default="all")
]
Least = Annotated[
    int,
    typer.Option(
        help="continue with at least this many processes if some are lost",
        show_default="all",
        min=0,
    ),
]


_SHOWN = {"bool": "", "str": "TEXT", "int": "NUMBER", "float": "NUMBER"}
_TYPE = re.compile(r"<(?:list\[)?(\w+)(?: range)?\]?>")


class _Plain:
    """Its help has PATH and NUMBER as types, and none for flags."""

    def get_params(self, ctx: Any) -> Any:
        """Arguments and options, `--help` included."""
        found = super().get_params(ctx)  # type: ignore[misc]  # of Typer's classes
        for param in found:
            if hasattr(param, "display_type"):  # older Typers have Click's names: no `<bool>`
                shown = _TYPE.sub(_plain, param.display_type(ctx))
                param.display_type = lambda ctx, shown=shown: shown
        return found


class PlainCommand(_Plain, TyperCommand):
    """A command with plain help."""


class PlainGroup(_Plain, TyperGroup):
    """A group of commands with plain help."""


def _plain(match: re.Match[str]) -> str:
    return _SHOWN.get(match[1], match[1].upper())


Coordinator = Annotated[str, typer.Option(help="HOST:PORT of process 0, on every host")]
Processes = Annotated[
    int | None, typer.Option(help="number of processes", show_default="from the environment, or 1")
]
Process = Annotated[
    int | None,
    typer.Option(help="number of this process, from 0", show_default="from the environment, or 0"),
]


def members(coordinator: str, processes: int | None, process: int | None) -> Hosts:
    """This command's processes, from the command line, else from the environment."""
    from gshard.mt.launch.environment import Hosts, find

    if processes == 1:  # a single process needs no coordinator
        return Hosts(coordinator, 1, process or 0).checked()
    if coordinator and processes is not None and process is not None:
        return Hosts(coordinator, processes, process).checked()
    found = find(os.environ)
    return Hosts(
        coordinator or found.coordinator,
        found.count if processes is None else processes,
        found.index if process is None else process,
        found.launcher,
    ).checked()
