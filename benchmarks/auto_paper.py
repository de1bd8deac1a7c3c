"""A layout for the paper's 12-layer MoE Transformer, with nothing annotated.

    python -m benchmarks.auto_paper               for 8 and for 2048 devices
    python -m benchmarks.auto_paper --devices 8   for one of them
    python -m benchmarks.auto_paper --differences what the gap consists of, line by line
    python -m benchmarks.auto_paper --out docs/results/auto_paper.md

The training step has a forward and a backward pass and Adafactor. The paper's own annotations
(groups and experts split) are lowered beside it. Seconds are wall and processor time of
`gshard.auto`, from the function to the layout: on a machine that others use, only the second says
what it takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import gshard
from benchmarks.auto_differences import differences, table
from gshard.forecast.hardware import hardware as hardware_of
from gshard.models.family import plan
from gshard.nn import Strategy, adafactor, init_state, train_step

# The member of the family, and the tokens of a batch where they are not the paper's.
MEMBERS: dict[int, tuple[str, int | None]] = {
    8: ("moe_128e_12l", 2**17),
    2048: ("moe_2048e_12l", None),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    devices: int
    model: str
    layout: gshard.Layout
    paper_seconds: float
    wall: float
    processor: float

    def markdown(self) -> str:
        """The row."""
        layout = self.layout
        return (
            f"| {self.devices} | {self.model} | {1e3 * self.paper_seconds:.1f} | "
            f"{1e3 * layout.seconds:.1f} | {layout.seconds / self.paper_seconds:.3f} | "
            f"{' x '.join(map(str, layout.mesh.values()))} | {_splits(layout, 'batch')} | "
            f"{_splits(layout, 'experts')} | {100 * layout.solver_gap:.2f}% | "
            f"{100 * layout.gap:.1f}% | {self.wall:.0f} | {self.processor:.0f} |"
        )


def _splits(layout: gshard.Layout, what: str) -> str:
    """How many tiles the batch, or the weights of experts, have along their dims."""
    assert layout.lowered is not None
    state, batch, _ = layout.lowered.in_shardings
    if what == "batch":
        found = {s.tiles for s in jax.tree.leaves(batch)}
    else:
        given = jax.tree_util.tree_flatten_with_path(state.model)[0]
        wide = [(jax.tree_util.keystr(path), s) for path, s in given]
        found = {s.tiles for path, s in wide if "experts" in path and len(s.tiles) == 4}
    return ", ".join(sorted("x".join(map(str, tiles)) for tiles in found))


def row(devices: int, hardware: str, seconds: float) -> Row:
    """The layout for so many devices, beside the paper's."""
    name, tokens = MEMBERS[devices]
    member = plan(name, devices, tokens)
    optimizer = adafactor()
    key = jax.eval_shape(lambda: jax.random.key(0))
    config = member.model.config
    state = jax.eval_shape(lambda key: init_state(config, optimizer, key), key)

    def step(state: Any, batch: Any, key: Any) -> Any:
        return train_step(state, batch, key, optimizer=optimizer)

    arguments = state, member.model.batch, key
    wall, processor = time.monotonic(), time.process_time()
    layout = gshard.auto(
        step, *arguments, devices=devices, hardware=hardware, seconds=seconds, donate_argnums=0
    )
    wall, processor = time.monotonic() - wall, time.process_time() - processor
    strategy = Strategy(devices)

    def annotated(state: Any, batch: Any, key: Any) -> Any:
        return train_step(state, batch, key, optimizer=optimizer, strategy=strategy)

    jitted = gshard.jit(annotated, devices=devices, donate_argnums=0, hardware=hardware)
    paper = jitted.lower(*arguments).forecast().serial_seconds
    return Row(devices, name, layout, paper, wall, processor)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_paper")
    parser.add_argument("--devices", type=int, choices=list(MEMBERS), help="by default all")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seconds", type=float, default=55.0, help="given to gshard.auto")
    parser.add_argument("--explain", action="store_true", help="the layouts, on standard error")
    parser.add_argument("--differences", action="store_true", help="likewise: forecast and bound")
    parser.add_argument("--out", type=Path, help="write the table here")
    options = parser.parse_args()
    lines = [
        "# The paper's 12-layer MoE Transformer, with nothing annotated",
        "",
        "A training step (forward, backward, Adafactor) as `gshard.auto` shards it, beside the",
        f"paper's annotations, on {options.hardware}: milliseconds are forecasts of the lowered",
        "programs. Tiles are those along the dims of the batch, and of the experts' weights",
        "[layers, experts, model, hidden]. The solver's gap is how far its answer may be from the",
        "best one of its model; the other gap is that to the bound, which holds for every layout",
        "over that mesh. The last two columns are the seconds that it took: of wall time, and of a",
        "processor.",
        "",
        "| devices | model | paper's ms | ours | ratio | mesh | tiles of the batch | of experts | "
        "solver's gap | gap | wall s | processor s |",
        "|---:|---|---:|---:|---:|---|---|---|---:|---:|---:|---:|",
    ]
    for devices in [options.devices] if options.devices else MEMBERS:
        found = row(devices, options.hardware, options.seconds)
        if options.explain:
            print(found.layout.explain(), file=sys.stderr)
        if options.differences:
            text = table(differences(found.layout, hardware_of(options.hardware)))
            print(text, file=sys.stderr, flush=True)
        lines.append(found.markdown())
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", "    python -m benchmarks.auto_paper", "", "prints this page."]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
