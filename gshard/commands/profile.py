"""`gshard profile`: measured times of a step compared with its forecast, by line and collective."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gshard.commands.functions import arguments_of, imported, one_line_errors, use_virtual_devices
from gshard.commands.options import Arguments, Hardware, Json, Shapes
from gshard.commands.show import working
from gshard.untrusted import printable_lines

if TYPE_CHECKING:
    from gshard.runtime.stages import Lowered

_WARM = 2.0  # seconds of steps that are not measured


def profile(
    function: Annotated[str, typer.Argument(help="module:function with annotations")],
    shapes: Shapes = None,
    arguments: Arguments = None,
    devices: Annotated[
        int | None, typer.Option(help="virtual CPU devices", show_default="JAX's devices", min=1)
    ] = None,
    hardware: Hardware = None,
    steps: Annotated[int, typer.Option(help="steps to run and measure", min=1)] = 5,
    trace: Annotated[
        Path | None, typer.Option(help="read this folder of jax.profiler.trace; run nothing")
    ] = None,
    fitted: Annotated[
        Path | None, typer.Option(help="a TOML file for the hardware, fitted to the times")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a partitioned step under JAX's profiler, and compare it with its forecast."""
    import json

    import gshard

    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        if devices is not None:
            use_virtual_devices(devices)
        given = arguments_of(shapes, arguments)
        with working() as tell:
            tell(f"partitioning and compiling {function}")
            lowered = gshard.jit(imported(function), hardware=hardware).lower(*given)
            lowered.compile()
            if trace is None:
                tell(f"running {steps} steps of {function}")
                _run(lowered, given, steps, folder)
            found = lowered.measured(trace or folder, hardware)
    print(json.dumps(found.as_dict(), indent=1) if as_json else printable_lines(str(found)))
    if fitted is not None:
        fitted.write_text(found.hardware_toml(), encoding="utf-8")


def _run(lowered: Lowered, given: tuple[Any, ...], steps: int, folder: str) -> None:
    """Run steps under the profiler, once others have warmed up: GPUs lower their clock under load.

    Abstract arguments are made: normal numbers, and zeros as integers. Each step has new ones,
    since a step may be given its arguments to overwrite.
    """
    import jax
    import jax.numpy as jnp

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return 0.02 * jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    compiled = lowered.compile()

    def step() -> None:
        values = jax.block_until_ready(jax.tree.map(made, given))
        jax.block_until_ready(compiled(*values))

    ready = time.monotonic() + (0.0 if jax.default_backend() == "cpu" else _WARM)
    step()
    while time.monotonic() < ready:
        step()
    with jax.profiler.trace(folder):
        for _ in range(steps):
            step()
