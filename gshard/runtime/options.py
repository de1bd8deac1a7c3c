"""The keywords of `gshard.jit`: those that `jax.jit` has, and its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np

from gshard.capture.inside import Inside
from gshard.capture.stage import USUAL, Variant
from gshard.forecast import Hardware
from gshard.moving.costs import MEMORY_LIMIT
from gshard.runtime.program import XlaSettings

__all__ = [
    "MEMORY_LIMIT", "JitKeywords", "Keywords", "Options", "check_partitioner",
    "checked_devices", "of_layout",
]  # fmt: skip


class JitKeywords(TypedDict, total=False):
    """The keywords of `gshard.jit` and their types; its docstring says what they mean."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: jax.Device | None
    backend: str | None
    inline: bool
    compiler_options: dict[str, Any] | None
    devices: Sequence[jax.Device] | int | None
    partitioner: str
    memory_limit: int
    strict: bool
    hardware: str | Path | Hardware | None
    annotations: Any
    reproducible: bool


@dataclass(frozen=True)
class Options:
    """How to partition: the keywords that `jax.jit` does not have."""

    devices: tuple[jax.Device, ...] | int | None
    backend: str | None
    partitioner: str
    memory_limit: int
    strict: bool
    hardware: Hardware | None = None  # to plan for; None: what JAX reports
    inside: tuple[Inside, ...] = ()  # annotations of tensors that the function makes
    variant: Variant = USUAL
    layout_devices: int | None = None  # how many the layout is for, where one is given
    shrunk: int = 1  # how many times smaller sizes are than those that are planned for

    def check_count(self, devices: int) -> None:
        """Refuse devices that are not as many as the layout is for."""
        if self.layout_devices not in (None, devices):
            raise ValueError(
                f"the layout is for {self.layout_devices} devices, and there are {devices}: give "
                "gshard.jit as many (devices=...), or choose a layout for these with gshard.auto"
            )

    def target(self, devices: tuple[jax.Device, ...] | int) -> str | None:
        """The platform that a program for `devices` is traced for; None: JAX's default."""
        if isinstance(devices, int):
            return self.hardware.compiler if self.hardware else None
        return devices[0].platform


@dataclass(frozen=True, eq=False)
class Keywords:
    """The keywords that `gshard.jit` shares with `jax.jit`."""

    of_jax: dict[str, Any]
    in_shardings: Any = None
    out_shardings: Any = None

    @property
    def shardings(self) -> list[Any]:
        """All shardings among them."""
        return jax.tree.leaves((self.in_shardings, self.out_shardings))

    def key(self, known: Any) -> Any:
        """The cache key of these keywords."""
        tree = jax.tree.structure((self.in_shardings, self.out_shardings))
        donated = (known.donate_argnums, known.donate_argnames)
        return tree, tuple(self.shardings), donated, self.settings(())

    def settings(self, donated: tuple[int, ...], *layouts: tuple[Any, ...]) -> XlaSettings:
        """The settings for XLA, for a call that donates the flat arguments `donated`.

        `layouts` are those of the flat arguments and of the results.
        """
        options = tuple(sorted((self.of_jax["compiler_options"] or {}).items()))
        return XlaSettings(donated, self.of_jax["keep_unused"], options, *layouts)

    def of_arrays(self, donated: tuple[int, ...]) -> Keywords:
        """The same for a function of flat arrays."""
        kept = {k: self.of_jax[k] for k in ("keep_unused", "inline", "compiler_options")}
        return Keywords({**kept, "donate_argnums": donated})


def check_partitioner(partitioner: str, reproducible: bool) -> None:
    """Refuse a partitioner that there is not, or that cannot do what is asked of it."""
    if partitioner not in ("gshard", "xla"):
        raise ValueError(f"partitioner is {partitioner!r}; allowed are 'gshard' and 'xla'")
    if reproducible and partitioner == "xla":
        raise ValueError("reproducible=True orders sums in gshard's plans; partitioner is 'xla'")


def of_layout(annotations: Any) -> tuple[tuple[Any, ...], int | None]:
    """The shardings inside and the number of devices of a layout, where one is given."""
    if annotations is None:
        return (), None
    if not hasattr(annotations, "inside_shardings"):
        raise TypeError(
            f"annotations is {annotations!r}; allowed is a gshard.Layout, as gshard.auto and "
            "gshard.Layout.load return it"
        )
    return annotations.inside_shardings, annotations.devices


def checked_devices(devices: Any, device: jax.Device | None) -> tuple[jax.Device, ...] | int | None:
    """The devices to run on, or a number of abstract devices; None: all devices."""
    if device is not None:
        if devices is not None:
            raise ValueError("device and devices are both given; device is a single one of them")
        return (device,)
    if isinstance(devices, int):
        if devices < 1:
            raise ValueError(f"devices is {devices}; at least 1 device is needed")
        return devices
    return None if devices is None else tuple(np.ravel(devices))
