"""Train each script for `jax.jit` and for gshard: what differs, the losses, and what moves."""

import argparse
import difflib
import importlib
from pathlib import Path
from typing import Any

import jax

NAMES = ("mingpt_nnx", "resnet_equinox", "transformer_haiku")
HERE = Path(__file__).parent


def difference(name: str) -> str:
    """The lines that the script for gshard has more, or other, than the one for `jax.jit`."""
    before, after = ((HERE / f"{name}{end}.py").read_text().splitlines() for end in ("_jax", ""))
    return "\n".join(
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@")) and line not in ("+", "-")
    )


def lowered(script: Any) -> Any:
    """The partitioned step of a script for gshard."""
    if script.__name__.endswith("equinox"):  # its data come first, so that the rest is donated
        return script.train_step.lower(script.batch(0), *script.setup())
    return script.train_step.lower(*script.setup(), *script.batch(0))


def moved(name: str) -> str:
    """What the partitioned step of a script sends, by kind."""
    found: dict[str, list[int]] = {}
    for c in lowered(importlib.import_module(f"examples.training.{name}")).collectives:
        found.setdefault(c.kind, []).append(c.total_bytes)
    rows = [f"{kind}: {len(sizes)}, {sum(sizes):,} bytes" for kind, sizes in sorted(found.items())]
    return "\n".join(rows)


def losses(name: str, steps: int) -> str:
    """Every fifth loss of a script."""
    script = importlib.import_module(f"examples.training.{name}")
    return " ".join(f"{loss:.3f}" for loss in script.train(steps)[::5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=NAMES)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    for name in [given.only] if given.only else NAMES:
        print(f"{name}\n\n{difference(name)}\n")
        print(f"jax.jit  {losses(f'{name}_jax', given.steps)}")
        print(f"gshard   {losses(name, given.steps)}")
        print(f"\none device sends per step:\n{moved(name)}\n", flush=True)


if __name__ == "__main__":
    main()
