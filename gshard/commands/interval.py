"""`gshard interval`: how often to checkpoint, so that failures of hosts cost least."""

from __future__ import annotations

from typing import Annotated

import typer

from gshard.commands.options import DevicesOfPaper, HardwareOfPaper, Json, Model, Plots
from gshard.errors import UserError


def interval(
    model: Model,
    hardware: HardwareOfPaper = "tpu-v3",
    devices: DevicesOfPaper = None,
    devices_per_host: Annotated[int, typer.Option(help="devices of each host", min=1)] = 8,
    host_days: Annotated[float, typer.Option(help="days between two failures of one host")] = 180.0,
    disk_rate: Annotated[float, typer.Option(help="GB/s that a host writes and reads")] = 1.0,
    restart: Annotated[
        float, typer.Option(help="seconds to detect a failure and start again, without loading")
    ] = 60.0,
    as_json: Json = False,
    plots: Plots = None,
) -> None:
    """Find the checkpoint interval that loses the least time to failures of hosts."""
    import json

    from gshard.models import failures
    from gshard.models.family import plan

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
    run = failures.FailingRun(most, host_days, save, restart + save)
    hosts = sorted({-(-most // 16), -(-most // 4), most, 4 * most})
    if as_json:
        print(json.dumps({"model": model, "save_seconds": save, **failures.as_dict(run, hosts)}))
    else:
        print(
            f"{model}: a host saves {state * min(devices_per_host, chosen.devices) / 1e9:.1f} GB "
            f"in {save:.0f} s, starts again in {run.restart_seconds:.0f} s and fails every "
            f"{host_days:g} days"
        )
        print("\n".join(failures.table(run, hosts)))
    if plots is not None:
        title = f"{model}, hosts that fail every {host_days:g} days"
        typer.echo(str(failures.plot(run, hosts, plots / "failures.svg", title)), err=True)
