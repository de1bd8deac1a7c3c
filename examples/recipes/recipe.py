"""What a recipe is: a training step, arguments for it, and what an expert's program would send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import gshard

D = 8  # devices


@dataclass(frozen=True)
class Recipe:
    """A training step with its annotations.

    `arguments` are shapes. `expert` is what one device sends in a program written by hand, in
    bytes.
    """

    name: str
    step: Callable
    arguments: tuple[Any, ...]
    expert: float

    def sent(self, collectives: Sequence[gshard.Collective]) -> int:
        """What one device sends."""
        return sum(c.total_bytes for c in collectives)


def all_gather(size: float, devices: int = D) -> float:
    """Bytes that a device sends so that each of them has all of `size` bytes."""
    return size * (devices - 1) / devices


def reduce_scatter(size: float, devices: int = D) -> float:
    """Bytes that a device sends so that each of them has its part of a sum of `size` bytes."""
    return size * (devices - 1) / devices


def all_reduce(size: float, devices: int = D) -> float:
    """Bytes that a device sends so that each of them has a sum of `size` bytes."""
    return 2 * size * (devices - 1) / devices


def all_to_all(size: float, devices: int = D) -> float:
    """Bytes that a device sends of the `size` bytes it has, a part for each of the others."""
    return size * (devices - 1) / devices


def fully_sharded(size: float, devices: int = D) -> float:
    """Bytes that a device sends for weights of `size` bytes, gathered, and gradients, scattered."""
    return all_gather(size, devices) + reduce_scatter(size, devices)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes, in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def show(recipes: Sequence[Recipe], **options: Any) -> None:
    """Print what every recipe sends and why, with `options` of gshard.jit; no device is needed."""
    for recipe in recipes:
        jitted = gshard.jit(recipe.step, devices=D, **options)
        found = jitted.lower(*recipe.arguments).collectives
        print(f"{recipe.name}: {recipe.sent(found):,} bytes, by hand {recipe.expert:,.0f}")
        for collective in found:
            print(f"  {collective}")
