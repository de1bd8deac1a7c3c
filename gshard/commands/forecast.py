"""`gshard forecast` and `gshard interval`: a step of the paper's models, and when to save it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gshard.commands import options
from gshard.commands.show import working
from gshard.errors import UserError

if TYPE_CHECKING:
    from gshard.forecast import Forecast, Hardware
    from gshard.models.family import Deployment

Tell = Callable[[str], None]  # says what is being done


def forecast(
    model: Annotated[
        str | None,
        typer.Argument(help="a model of the paper", autocompletion=options.complete_models),
    ] = None,
    hardware: options.HardwareOfPaper = "tpu-v3",
    devices: options.DevicesOfPaper = None,
    batch_tokens: Annotated[
        str | None,
        typer.Option(
            help="source and target tokens together, as in 4M", show_default="the paper's"
        ),
    ] = None,
    remat: Annotated[
        str | None,
        typer.Option(
            help="none or layer", show_default="as the paper: layer from 36 layers on, or to fit"
        ),
    ] = None,
    dispatch: Annotated[str, typer.Option(help="einsum, as in the paper, or index")] = "einsum",
    fit: Annotated[
        str | None, typer.Option(help='list what fits on these devices, as in "64 x h100"')
    ] = None,
    as_json: options.Json = False,
    plots: options.Plots = None,
    trace: Annotated[Path | None, typer.Option(help="a file for Perfetto")] = None,
    page: options.Page = None,
) -> None:
    """Forecast time and memory of a training step; no accelerator needed."""
    from gshard.forecast import hardware as hardware_of

    try:
        hardware_of(hardware)  # report a misspelt name before the models are imported
        if fit is not None:
            _show_fitting(fit, as_json)
            return
        if model is None:
            raise ValueError("name a model, or give --fit with devices, as in --fit '64 x h100'")
        tokens = _tokens(batch_tokens)
        with working() as tell:
            chosen, found = _forecast(tell, model, hardware, devices, tokens, remat, dispatch)
    except ValueError as error:
        raise UserError(str(error)) from None
    from gshard.forecast.report import summary, table
    from gshard.forecast.report import trace as as_trace
    from gshard.graph.readable import size
    from gshard.models.family import memory_parts, part_of

    held = memory_parts(chosen, found)
    if as_json:
        numbers = {"model": model, **found.as_dict(part_of), "memory_parts": held}
        print(json.dumps(numbers, indent=1))
    else:
        rows = [f"{name:<38} {size(count):>8}" for name, count in held.items()]
        print("\n".join([model, *summary(found), "", *table(found.by(part_of)), "", *rows]))
    if trace is not None:
        trace.write_text(json.dumps(as_trace(found)), encoding="utf-8")
    if plots is not None or page is not None:
        _draw(chosen, found, plots, page)


def _draw(chosen: Deployment, found: Forecast, plots: Path | None, page: Path | None) -> None:
    """Plots and the page, with forecasts for fewer devices."""
    with working() as tell:
        growth = _by_devices(tell, chosen, found.hardware)
    model = chosen.model.name
    if plots is not None:
        from gshard.models.plots import plot_forecast, plot_growth

        paths = plot_forecast(found, plots, f"{model} on {found.devices} x {found.hardware.name}")
        paths += plot_growth(growth, plots, f"weak scaling of {model}")
        typer.echo("\n".join(map(str, paths)), err=True)
    if page is not None:
        shown = chosen.lowered(found.hardware).page(growth=growth)
        page.write_text(shown, encoding="utf-8")


def _by_devices(tell: Tell, chosen: Deployment, hardware: Hardware) -> dict[int, Forecast]:
    """The same on fewer devices, with as many tokens on each."""
    from gshard.models.family import plan

    found = {}
    for devices in (chosen.devices // 16, chosen.devices // 4, chosen.devices):
        tokens = chosen.batch_tokens * devices // chosen.devices
        remat, how = chosen.model.config.remat, chosen.model.config.dispatch
        if devices:
            tell(f"partitioning {chosen.model.name} for {devices:,} devices")
            smaller = plan(chosen.model.name, devices, tokens, str(remat), how)
            found[devices] = smaller.forecast(hardware)
    return found


def _forecast(
    tell: Tell,
    model: str,
    hardware: str,
    devices: int | None,
    tokens: int | None,
    remat: str | None,
    how: str,
) -> tuple[Deployment, Forecast]:
    """With rematerialization as requested, else as in the paper, else as needed to fit."""
    from gshard.graph.readable import size
    from gshard.models.family import plan

    for setting in (remat,) if remat else (None, "layer"):
        chosen = plan(model, devices, tokens, setting, how)
        more = ", with rematerialization" if chosen.model.config.remat == "layer" else ""
        tell(f"partitioning {model} for {chosen.devices:,} x {hardware}{more}")
        found = chosen.forecast(hardware)
        if found.fits or remat:
            return chosen, found
        if chosen.model.config.remat == "layer":
            break
    machine, state = found.hardware, found.memory.arguments
    raise ValueError(
        f"{model} with {chosen.batch_tokens:,} tokens on {chosen.devices} x {machine.name} takes "
        f"{size(found.memory_bytes)} on each device even with rematerialization, which has "
        f"{size(machine.memory)}: {_nearest(chosen, machine, state, model)}"
    )


def _nearest(chosen: Any, machine: Any, state: int, model: str) -> str:
    """The nearest batch that fits, or why none does."""
    from gshard.graph.readable import size
    from gshard.models.family import plan

    tokens = chosen.batch_tokens
    while state <= machine.memory:
        tokens //= 2
        try:
            smaller = plan(model, chosen.devices, tokens, "layer", "einsum").forecast(machine)
        except ValueError:
            break
        if smaller.fits:
            return f"a batch of {tokens:,} tokens fits; --remat layer forecasts this one anyway"
    alone = f"weights and optimizer state alone take {size(state)}"
    return f"{alone}; more devices hold fewer experts each"


def _show_fitting(text: str, as_json: bool) -> None:
    from gshard.forecast.hardware import several
    from gshard.graph.readable import size
    from gshard.models.family import fitting

    devices, machine = several(text)
    with working() as tell:
        rows = fitting(devices, machine, tell)
    if as_json:
        print(json.dumps([{"model": r.plan.model.name, **r.forecast.as_dict()} for r in rows]))
        return
    print(f"{'model':<16} {'weights':>8} {'batch':>12} {'remat':>6} {'memory':>9} {'tokens/s':>11}")
    for r in rows:
        print(
            f"{r.plan.model.name:<16} {r.plan.model.weights / 1e9:>7.1f}B "
            f"{r.plan.batch_tokens:>12,} {r.plan.model.config.remat!s:>6} "
            f"{size(r.forecast.memory_bytes):>9} {r.tokens_per_second:>11,.0f}"
        )


def _tokens(text: str | None) -> int | None:
    if text is None:
        return None
    scale = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    try:
        return round(float(text.rstrip("kKmM")) * scale)
    except ValueError:
        raise ValueError(f"--batch-tokens is {text!r}; write a number, as in 4M or 65536") from None


def interval(
    model: options.Model,
    hardware: options.HardwareOfPaper = "tpu-v3",
    devices: options.DevicesOfPaper = None,
    devices_per_host: Annotated[int, typer.Option(help="devices of each host", min=1)] = 8,
    host_days: Annotated[float, typer.Option(help="days between two failures of one host")] = 180.0,
    disk_rate: Annotated[float, typer.Option(help="GB/s that a host writes and reads")] = 1.0,
    restart: Annotated[
        float, typer.Option(help="seconds to detect a failure and start again, without loading")
    ] = 60.0,
    as_json: options.Json = False,
    plots: options.Plots = None,
) -> None:
    """Find the checkpoint interval that loses the least time to failures of hosts."""
    from gshard.graph.readable import size
    from gshard.models import failures
    from gshard.models.family import plan

    if min(host_days, disk_rate) <= 0 or restart < 0:
        raise UserError(
            f"--host-days {host_days:g}, --disk-rate {disk_rate:g} and --restart {restart:g}: "
            "the first two must be above 0, the last at least 0"
        )
    try:
        chosen = plan(model, devices)
        state = chosen.forecast(hardware).memory.donated
    except ValueError as error:
        raise UserError(str(error)) from None
    save = failures.save_seconds(chosen, state, devices_per_host, 1e9 * disk_rate)
    most = -(-chosen.devices // devices_per_host)
    run = failures.FailingRun(most, host_days, save, restart + save)
    hosts = sorted({-(-most // 16), -(-most // 4), most, 4 * most})
    if as_json:
        print(json.dumps({"model": model, "save_seconds": save, **failures.as_dict(run, hosts)}))
    else:
        saved = size(state * min(devices_per_host, chosen.devices))
        again = f"starts again in {run.restart_seconds:.0f} s and fails every {host_days:g} days"
        print(f"{model}: a host saves {saved} in {save:.0f} s, {again}")
        print("\n".join(failures.table(run, hosts)))
    if plots is not None:
        title = f"{model}, hosts that fail every {host_days:g} days"
        typer.echo(str(failures.plot(run, hosts, plots / "failures.svg", title)), err=True)
