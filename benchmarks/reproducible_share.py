"""The share of each of several devices, on one: whether its kernels give the bits of one device.

    python -m benchmarks.reproducible_share shares.json      on the GPU, or the CPU, of this machine
    python -m benchmarks.reproducible_share shares.json --only FSDP --types float32 --devices 2,4,8

A single GPU cannot run the program of 8: its collectives have nobody to exchange with. But
`lowered.replay` runs the operators of all devices one at a time, exchanges their values itself,
and needs one device. So a step of the reproducible program for 8 devices and one for a single
device run here, operator by operator with the kernels of this device, and their bits are compared:
a library that takes another kernel for a share of a product shows. Step times are those of the
compiled program on one device, beside the usual program.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import gshard
from benchmarks.reproducible import digest, machine, timed
from benchmarks.reproducible_cases import FIRST, MOST, Case, case_of, names, types_of
from gshard.reproducible.products import COMPILER_OPTIONS

RUNS = 15  # of each compiled program


def replayed(case: Case) -> str:
    """The bits of one step, whose operators run on this machine's device one at a time."""
    lowered = gshard.jit(case.step, devices=case.devices, reproducible=True).lower(*case.arguments)
    compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    here = mock.patch("gshard.checking.on_host.host", return_value=jax.devices()[0])
    with here, mock.patch.object(jax, "jit", compiled):
        replay = lowered.replay(*case.arguments)
        replay.run()
    return digest(replay.results)


def measured(name: str, dtype: str, counts: list[int]) -> dict[str, Any]:
    """One program: its bits on one device and as shares of others, and what it takes compiled."""
    start = time.monotonic()
    row: dict[str, Any] = {"program": name, "type": dtype, "machine": machine()}
    row["bits"] = replayed(case_of(name, dtype, 1))
    row |= {f"bits of {count}": replayed(case_of(name, dtype, count)) for count in counts}
    return row | timed(case_of(name, dtype, 1), RUNS) | {"seconds": round(time.monotonic() - start)}


def main() -> None:
    """Measure the programs that are asked for, and add them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="file that rows are added to")
    parser.add_argument("--only", default="", help="programs named like this; else four")
    parser.add_argument("--types", default="float32,bfloat16")
    parser.add_argument("--devices", default=str(MOST), help="how many, such as 2,4,8")
    options = parser.parse_args()
    counts = [int(count) for count in options.devices.split(",")]
    for name in [n for n in names() if (options.only in n if options.only else n in FIRST)]:
        for dtype in [t for t in options.types.split(",") if t in types_of(name)]:
            row = measured(name, dtype, counts)
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            others = [count for count in counts if row[f"bits of {count}"] != row["bits"]]
            equal = f"OTHER BITS on {others}" if others else f"equal, {row['bits']}"
            ratio = row["time"] / row["usual time"]
            print(
                f"{row['seconds']:4} s  {name}, {dtype}: {equal}, time x usual {ratio:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
