"""`gshard.auto` on a model whose layers are written out, compared with a scan over them.

    python -m benchmarks.auto_layers --layers 80

prints, for a training step of a Transformer on 8 x h100: equations, the seconds of work that the
search counted and the processor seconds that it took; the forecast and the bytes that a device
sends: of the scan, and of the written-out layers with their own layout and with the arguments' part
of the scan's.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence

import gshard
from examples.recipes import transformer
from examples.recipes.transformer import Size
from gshard.autosharding.layout.annotations import Annotated
from gshard.autosharding.traced import TracedProgram
from gshard.graph.regions import walk
from gshard.runtime.stages import Lowered


def _unstacked(annotations: Sequence[Annotated], layers: int) -> Iterator[Annotated]:
    """Annotations of stacked weights, for each layer by itself."""
    for a in annotations:
        before, found, name = a.path.partition("['layers']")
        for number in range(layers if found else 0):
            path = f"{before}{found}[{number}]{name}"
            yield Annotated(path, a.shape[1:], a.dims[1:])
        if not found:
            yield a


def main() -> None:
    """Search, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    count = parser.parse_args().layers
    size = Size(L=count, B=16, S=512, M=1024, N=16, F=4096, V=32_000)
    batch = transformer.tokens(size)
    written = transformer.shapes(size)
    stacked = transformer.stacked(written)
    found = {}
    print("| layers | equations | work s | processor s | equal layers |")
    print("|---|---:|---:|---:|---:|")
    for name, params in (("written out", written), ("scan", stacked)):
        subject = TracedProgram.of(transformer.sgd, (params, batch), 8)
        equations = sum(1 for _ in walk(subject.flat.jaxpr))
        began = time.process_time()
        layout = gshard.auto(transformer.sgd, params, batch, devices=8, hardware="h100")
        took, work = time.process_time() - began, sum(s for s, _ in layout.phases.values())
        print(f"| {name} | {equations:,} | {work:.0f} | {took:.0f} | {layout.layers} |", flush=True)
        found[name] = layout
    moved = dataclasses.replace(
        found["scan"],
        annotations=tuple(_unstacked(found["scan"].annotations, count)),
        results=tuple(_unstacked(found["scan"].results, count)),
        inside=(),
    )
    jitted = gshard.jit(transformer.sgd, annotations=moved, devices=8, hardware="h100")
    lowered = {name: layout.lowered for name, layout in found.items()}
    lowered["written out, arguments as in the scan"] = jitted.lower(written, batch)
    print("\n| layers | ms per step | bytes sent | GB |")
    print("|---|---:|---:|---:|")
    for name, program in lowered.items():
        assert isinstance(program, Lowered)
        forecast = program.forecast("h100")
        figures = f"{1e3 * forecast.serial_seconds:.1f} | {forecast.sent_bytes:,}"
        print(f"| {name} | {figures} | {forecast.memory_bytes / 1e9:.1f} |")
    print(f"\n{found['written out']}")


if __name__ == "__main__":
    main()
