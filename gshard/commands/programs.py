"""`gshard explain`, `compare`, `auto`, `fits` and `profile`: what any JAX program would do."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from gshard.commands.options import Arguments, Hardware, HardwareOfPaper, Json, Page, Plots, Shapes
from gshard.commands.show import working
from gshard.errors import UserError, nearest
from gshard.untrusted import printable_lines

if TYPE_CHECKING:
    from gshard.explanation import Explanation
    from gshard.runtime.stages import Lowered

_DOES_NOT_FIT = 3  # the exit status of `fits`; 1 and 2 are mistakes
_Annotated = Annotated[
    str, typer.Argument(help="module:function with annotations; with or without jit")
]
_Step = Annotated[str, typer.Argument(help="module:function, with or without jax.jit")]
_Devices = Annotated[int, typer.Option(help="number of devices", min=1)]
_Auto = Annotated[
    float, typer.Option("--budget", help="seconds of gshard.auto; 0 skips it", min=0.0)
]


def _print(found: Any, as_json: bool) -> None:
    """What was found, for programs or for people."""
    print(json.dumps(found.as_dict(), indent=1) if as_json else printable_lines(str(found)))


def explain(
    function: _Annotated,
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: _Devices = 8,
    hardware: Hardware = None,
    as_json: Json = False,
    page: Page = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--budget",
            help="seconds to try other annotations",
            show_default="10; 0 if large",
            min=0.0,
        ),
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="prove that all devices compute what the function does")
    ] = False,
    dump: Annotated[
        Path | None, typer.Option(help="a folder for the program after every stage of lowering")
    ] = None,
) -> None:
    """Explain what a partitioned function sends, why, and which annotation to change."""
    from gshard.comparing.step import Step

    with one_line_errors():
        step = Step(imported(function), arguments_of(shapes, arguments), parts=devices)
        with working() as tell:
            tell(f"partitioning {function} for {devices} devices")
            lowered = step.by_gshard(hardware, devices=devices)
        if prove:
            raise typer.Exit(_prove(lowered))
        explanation = lowered.explain(seconds=seconds)
        if as_json:
            sent = [{**asdict(c), "reason": c.reason} for c in lowered.collectives]
            print(json.dumps({**lowered.forecast().as_dict(), "collectives": sent}, indent=1))
        else:
            _show(explanation)
        if page is not None:
            page.write_text(explanation.page(), encoding="utf-8")
        if dump is not None:
            lowered.dump(dump)


def _prove(lowered: Lowered) -> int:
    """Print the proof, or what differs; the exit status."""
    with working() as tell:
        tell("running both programs in a finite field")
        report = lowered.prove()
    print(printable_lines(str(report)))
    return 0 if report.ok else 1


def _show(explanation: Explanation) -> None:
    """Bytes and lines at once; then the changes of annotations, with a bar while they are tried."""
    from gshard.explanation.explained import fix_lines, text

    if explanation.is_default:
        name = explanation.forecast.hardware.name
        print(f"hardware: {name}, as JAX reports; --hardware plans and times for another")
    print(printable_lines("\n".join(text(explanation))), flush=True)
    if not explanation.lines:
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("trying other annotations", total=None)
        explanation.search(lambda done, total: bar.update(task, completed=done, total=total))
    print(printable_lines("\n".join(["", *fix_lines(explanation)])))


def compare(
    step: _Step,
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: _Devices = 8,
    hardware: HardwareOfPaper = "h100",
    seconds: _Auto = 30.0,
    as_json: Json = False,
    page: Page = None,
) -> None:
    """Compare what XLA and gshard make of a training step; no accelerator needed."""
    from gshard.comparing.comparison import compare
    from gshard.comparing.step import Step

    with one_line_errors():
        use_virtual_devices(devices)
        given = Step(imported(step), arguments_of(shapes, arguments))
        with working() as tell:
            found = compare(given, hardware, seconds, tell)
    _print(found, as_json)
    if page is not None:
        page.write_text(found.page(), encoding="utf-8")


def fits(
    step: _Step,
    shapes: Shapes = None,
    arguments: Arguments = None,
    on: Annotated[str, typer.Option(help="number and kind of devices, as in 8xh100")] = "8xh100",
    batch: Annotated[
        list[int] | None,
        typer.Option(help="positions of the arguments with a batch dim", show_default="last"),
    ] = None,
    seconds: _Auto = 30.0,
    as_json: Json = False,
) -> None:
    """Say whether a training step fits in memory; exit status 0 if it does, 3 if not."""
    from gshard.comparing.fits import fits
    from gshard.comparing.step import Step
    from gshard.forecast.hardware import several

    with one_line_errors():
        devices, machine = several(on)
        use_virtual_devices(devices)
        given = Step(imported(step), arguments_of(shapes, arguments))
        with working() as tell:
            found = fits(given, machine, batch, seconds, tell)
    _print(found, as_json)
    if not found.fits:
        raise typer.Exit(_DOES_NOT_FIT)


@contextlib.contextmanager
def _phases(tell: Callable[[str], None]) -> Iterator[None]:
    """Say which phase a search has begun, while the block runs."""
    log, handler = logging.getLogger("gshard.auto"), logging.Handler()
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


def auto(
    function: Annotated[str, typer.Argument(help="module:function")],
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: _Devices = 8,
    hardware: Hardware = None,
    memory: Annotated[
        str | None,
        typer.Option(help="bytes on each device, as in '16 GB'", show_default="the hardware's"),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--budget", help="seconds of search; at least 10 until a layout fits", min=0.0
        ),
    ] = 60.0,
    explain: Annotated[
        bool, typer.Option("--explain", help="show what else was considered, and which limits bind")
    ] = False,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option(help="a file for the layout")] = None,
    plots: Plots = None,
) -> None:
    """Choose a mesh and annotations for a function; no accelerator needed."""
    from gshard.autosharding.layout.annotations import as_text
    from gshard.comparing.step import Step

    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out is {out}; there is no folder {out.parent}")
    with one_line_errors():
        given = arguments_of(shapes, arguments)
        step = Step(imported(function), given)
        with working() as tell, _phases(tell):
            tell(f"choosing annotations for {devices} devices, about {seconds:.0f} seconds")
            keywords = {"devices": devices, "hardware": hardware, "memory": memory}
            layout = step.by_auto(**keywords, seconds=seconds)
    if out is not None:
        layout.save(out)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        typer.echo(str(layout.plot_frontier(plots / "frontier.svg")), err=True)
    if as_json:
        print(as_text(layout), end="")
    else:
        print(printable_lines(layout.explain() if explain else str(layout)))


def profile(
    function: _Annotated,
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: Annotated[
        int | None, typer.Option(help="virtual CPU devices", show_default="JAX's devices", min=1)
    ] = None,
    hardware: Hardware = None,
    steps: Annotated[int, typer.Option(help="steps to run and measure at least", min=1)] = 5,
    trace: Annotated[
        Path | None, typer.Option(help="read this folder of jax.profiler.trace; run nothing")
    ] = None,
    fitted: Annotated[
        Path | None, typer.Option(help="a TOML file for the hardware, fitted to the times")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a partitioned step under JAX's profiler, and compare it with its forecast."""
    import jax

    from gshard.comparing.step import Step
    from gshard.explanation.profiled import trace_steps

    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        if devices is not None:
            use_virtual_devices(devices)
        step = Step(imported(function), arguments_of(shapes, arguments))
        with working() as tell:
            tell(f"partitioning and compiling {function}")
            lowered = step.by_gshard(hardware, devices=tuple(jax.devices()))
            lowered.compile()
            if trace is None:
                tell(f"running {steps} steps of {function}")
                inside = step.args if step.is_plain else lowered.in_info
                trace_steps(lowered.compile(), inside, steps, folder)
            found = lowered.measured(trace or folder, hardware)
    _print(found, as_json)
    if fitted is not None:
        fitted.write_text(found.hardware_toml(), encoding="utf-8")


_DTYPES = {
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "bf16": "bfloat16",
    "bool": "bool",
    "c64": "complex64",
}


def imported(name: str) -> Any:
    """A function by `module:function`, from the working folder or what is installed."""

    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"{name!r} is not the name of a function; write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"{name!r} is {found!r}, and not a function")
    return found


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A context in which errors of a user's functions become one line that begins with theirs."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        where = _user_line(error)
        if not where and not isinstance(error, (ValueError, TypeError)):
            raise  # a defect of gshard, not of the function
        text = " ".join(str(error).split("\n--------------------")[0].split())
        raise UserError(text if where in text else f"{where}: {text}") from None


def _user_line(error: Exception) -> str:
    """The innermost line of an error that is neither Python's nor of what is installed."""
    from gshard.graph.source import shown_path

    paths = sysconfig.get_paths()
    installed = {paths["stdlib"], paths["purelib"], paths["platlib"], sys.prefix}
    others = [Path(__file__).parents[1], *map(Path, installed)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(other) for other in others):
            return f"{shown_path(frame.filename)}:{frame.lineno}"
    return ""


def arguments_of(shapes: Sequence[str] | None, function: str | None) -> tuple[Any, ...]:
    """The arguments of a function: by their shapes, or as `module:function` returns them."""
    if bool(shapes) == (function is not None):
        raise UserError("give the shapes of the arguments, or --arguments module:function")
    given = imported(function)() if function else [shape_of(s) for s in shapes or ()]
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def use_virtual_devices(count: int) -> None:
    """Let JAX have `count` virtual CPU devices, on which XLA partitions without an accelerator."""
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started, which it does once in a process
        if jax.device_count() != count:
            raise ValueError(
                f"JAX has {jax.device_count()} devices here, and not {count}"
            ) from None


def shape_of(text: str) -> Any:
    """An array's type, such as `f32[8,256,128]`."""

    import jax

    match = re.fullmatch(r"([a-z]+\d*)\[([\d,\s]*)\]", text)
    if match is None:
        raise ValueError(f"{text!r} is not a shape; write a dtype and sizes, as in f32[8,256,128]")
    if match[1] not in _DTYPES:
        raise ValueError(
            f"the dtype of {text!r} is {match[1]!r}; allowed are {', '.join(_DTYPES)}"
            f"{nearest(match[1], _DTYPES)}"
        )
    sizes = [int(n) for n in match[2].split(",") if n.strip()]
    return jax.ShapeDtypeStruct(tuple(sizes), _DTYPES[match[1]])
