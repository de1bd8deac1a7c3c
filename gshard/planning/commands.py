"""`gshard forecast` and `gshard explain`: see it before you run it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gshard.forecast import Forecast
    from gshard.planning.family import Plan


def forecast(
    model: Annotated[str | None, typer.Argument(help="a member of the family")] = None,
    hardware: Annotated[str, typer.Option(help="a name, or a TOML file")] = "tpu-v3",
    devices: Annotated[int | None, typer.Option(help="[the paper's]")] = None,
    batch_tokens: Annotated[
        str | None, typer.Option(help="source and target tokens together, as in 4M [the paper's]")
    ] = None,
    remat: Annotated[str | None, typer.Option(help="none or layer [what fits, none first]")] = None,
    dispatch: Annotated[str, typer.Option(help="einsum, as in the paper, or index")] = "einsum",
    fit: Annotated[
        str | None, typer.Option(help='say what fits on devices, as in "64 x h100"')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    plots: Annotated[Path | None, typer.Option(help="a folder for PNG files")] = None,
    trace: Annotated[Path | None, typer.Option(help="a file for Perfetto")] = None,
    page: Annotated[Path | None, typer.Option(help="a file for the explained program")] = None,
) -> None:
    """Say what a training step of the family takes on each device, without any device."""
    import json

    from gshard.mt.errors import UserError

    try:
        if fit is not None:
            _show_fitting(fit, as_json)
            return
        if model is None:
            raise ValueError("name a model, or give --fit with devices, as in --fit '64 x h100'")
        chosen, found = _forecast(model, hardware, devices, _tokens(batch_tokens), remat, dispatch)
    except ValueError as error:
        raise UserError(str(error)) from None
    from gshard.forecast.report import summary, table
    from gshard.forecast.trace import trace as as_trace
    from gshard.planning.family import memory_parts, part_of

    held = memory_parts(chosen, found)
    if as_json:
        said = {"model": model, **found.as_dict(part_of), "memory_parts": held}
        print(json.dumps(said, indent=1))
    else:
        rows = [f"{name:<38} {count / 1e9:>8.2f} GB" for name, count in held.items()]
        print("\n".join([model, *summary(found), "", *table(found.by(part_of)), "", *rows]))
    if trace is not None:
        trace.write_text(json.dumps(as_trace(found)), encoding="utf-8")
    growth = _by_devices(chosen, hardware) if plots or page else {}
    if plots is not None:
        from gshard.planning.plots import plot_forecast, plot_growth

        title = f"{model} on {found.devices} x {hardware}"
        paths = plot_forecast(found, plots, title)
        paths += plot_growth(growth, plots, f"{model}, as much work on each")
        typer.echo("\n".join(map(str, paths)), err=True)
    if page is not None:
        page.write_text(chosen.lowered.page(hardware, growth), encoding="utf-8")


def interval(
    model: Annotated[str, typer.Argument(help="a member of the family")],
    hardware: Annotated[str, typer.Option(help="a name, or a TOML file")] = "tpu-v3",
    devices: Annotated[int | None, typer.Option(help="[the paper's]")] = None,
    devices_per_host: Annotated[int, typer.Option(min=1)] = 8,
    host_days: Annotated[float, typer.Option(help="between two failures of one host")] = 180.0,
    disk_rate: Annotated[float, typer.Option(help="GB/s that a host writes and reads")] = 1.0,
    restart: Annotated[
        float, typer.Option(help="seconds to notice a failure and start, without reading")
    ] = 60.0,
    plot: Annotated[Path | None, typer.Option(help="a PNG file")] = None,
) -> None:
    """Say how often to save: the time that failures of hosts cost, against hosts and interval."""
    from gshard.mt.errors import UserError
    from gshard.planning import failures
    from gshard.planning.family import plan

    if min(host_days, disk_rate) <= 0 or restart < 0:
        raise UserError(
            f"--host-days {host_days:g}, --disk-rate {disk_rate:g} and --restart {restart:g}: "
            "the first two must be above 0, the last at least 0"
        )
    try:
        chosen = plan(model, devices)
        found = chosen.forecast(hardware)
    except ValueError as error:
        raise UserError(str(error)) from None
    state = found.memory.donated
    save = failures.save_seconds(chosen, state, devices_per_host, 1e9 * disk_rate)
    most = -(-chosen.devices // devices_per_host)
    run = failures.Run(most, host_days, save, restart + save)
    hosts = sorted({-(-most // 16), -(-most // 4), most, 4 * most})
    print(
        f"{model}: a host saves {state * min(devices_per_host, chosen.devices) / 1e9:.1f} GB in "
        f"{save:.0f} s, starts again in {run.restart_seconds:.0f} s and fails every "
        f"{host_days:g} days"
    )
    print("\n".join(failures.table(run, hosts)))
    if plot is not None:
        failures.plot(run, hosts, plot, f"{model}, hosts that fail every {host_days:g} days")


def _by_devices(chosen: Plan, hardware: str) -> dict[int, Forecast]:
    """The same on fewer devices, with as many tokens on each."""
    from gshard.planning.family import plan

    found = {}
    for devices in (chosen.devices // 16, chosen.devices // 4, chosen.devices):
        tokens = chosen.batch_tokens * devices // chosen.devices
        remat, how = chosen.model.config.remat, chosen.model.config.dispatch
        if devices:
            smaller = plan(chosen.model.name, devices, tokens, str(remat), how)
            found[devices] = smaller.forecast(hardware)
    return found


def explain(
    function: Annotated[str, typer.Argument(help="module:function, annotated")],
    shapes: Annotated[list[str], typer.Argument(help="its arguments, as in f32[8,256,128]")],
    devices: Annotated[int, typer.Option(help="how many")] = 8,
    hardware: Annotated[str, typer.Option(help="a name, or a TOML file")] = "tpu-v3",
    page: Annotated[Path | None, typer.Option(help="an HTML file to write")] = None,
) -> None:
    """Say what a partitioned function moves, why, and which annotation to change."""
    import gshard
    from gshard.mt.errors import UserError

    try:
        fn, arguments = _imported(function), [_shape(s) for s in shapes]
        lowered = gshard.jit(fn, devices=devices).lower(*arguments)
        print(lowered.explain(hardware))
        if page is not None:
            page.write_text(lowered.page(hardware), encoding="utf-8")
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from None


def _forecast(
    model: str, hardware: str, devices: int | None, tokens: int | None, remat: str | None, how: str
) -> tuple[Plan, Forecast]:
    """Under the setting of remat that was asked for, or the first that fits."""
    from gshard.planning.family import plan

    for setting in (remat,) if remat else ("none", "layer"):
        chosen = plan(model, devices, tokens, setting, how)
        found = chosen.forecast(hardware)
        if found.fits or remat:
            return chosen, found
    machine, state = found.hardware, found.memory.arguments
    raise ValueError(
        f"{model} with {chosen.batch_tokens:,} tokens on {chosen.devices} x {machine.name} takes "
        f"{found.memory_bytes / 1e9:.1f} GB on each device even with rematerialization, which has "
        f"{machine.memory / 1e9:.1f} GB: {_nearest(chosen, machine, state, model)}"
    )


def _nearest(chosen: Any, machine: Any, state: int, model: str) -> str:
    """The nearest batch that fits, or why none does."""
    from gshard.planning.family import plan

    tokens = chosen.batch_tokens
    while state <= machine.memory:
        tokens //= 2
        try:
            smaller = plan(model, chosen.devices, tokens, "layer", "einsum").forecast(machine)
        except ValueError:
            break
        if smaller.fits:
            return f"a batch of {tokens:,} tokens fits; --remat layer shows this one all the same"
    return (
        f"weights and optimizer state alone take {state / 1e9:.1f} GB; more devices hold fewer "
        "experts each"
    )


def _show_fitting(text: str, as_json: bool) -> None:
    import json

    from gshard.planning.fit import fitting, parse

    devices, machine = parse(text)
    rows = fitting(devices, machine)
    if as_json:
        print(json.dumps([{"model": r.plan.model.name, **r.forecast.as_dict()} for r in rows]))
        return
    print(f"{'model':<16} {'weights':>8} {'batch':>12} {'remat':>6} {'memory':>9} {'tokens/s':>11}")
    for r in rows:
        print(
            f"{r.plan.model.name:<16} {r.plan.model.weights / 1e9:>7.1f}B "
            f"{r.plan.batch_tokens:>12,} {r.plan.model.config.remat!s:>6} "
            f"{r.forecast.memory_bytes / 1e9:>6.1f} GB {r.tokens_per_second:>11,.0f}"
        )


def _tokens(text: str | None) -> int | None:
    if text is None:
        return None
    scale = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    try:
        return round(float(text.rstrip("kKmM")) * scale)
    except ValueError:
        raise ValueError(f"--batch-tokens is {text!r}; write a number, as in 4M or 65536") from None


def _imported(name: str) -> Any:
    import importlib
    import sys

    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"{name!r} names no function; write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from None


def _shape(text: str) -> Any:
    import re

    import jax

    match = re.fullmatch(r"([a-z]+\d*)\[([\d,\s]*)\]", text)
    if match is None:
        raise ValueError(f"{text!r} is no shape; write a dtype and sizes, as in f32[8,256,128]")
    if match[1] not in _DTYPES:
        near = difflib.get_close_matches(match[1], _DTYPES, 1, cutoff=0.0)[0]
        raise ValueError(
            f"the dtype of {text!r} is {match[1]!r}; allowed are {', '.join(_DTYPES)}; the nearest "
            f"is {near!r}"
        )
    sizes = [int(n) for n in match[2].split(",") if n.strip()]
    return jax.ShapeDtypeStruct(tuple(sizes), _DTYPES[match[1]])


_DTYPES = {
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "bf16": "bfloat16",
    "bool": "bool",
    "c64": "complex64",
}
