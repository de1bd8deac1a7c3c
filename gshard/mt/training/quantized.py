"""Weights in 8 bits: integers of -127 to 127, and a scale for each output of a product.

What a product sums over shares a scale, of every expert by itself, since a scale can be applied
after the sum. Of the embeddings each token has one, which serves the lookup and the logits.
Normalization and routers keep their numbers: they are small, and a router's choices depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST = 127  # symmetric: -128 is not used


@dataclass(frozen=True)
class Quantized:
    """An array of `values * scale`; `scale` has size 1 in the dims that share one."""

    values: np.ndarray  # int8
    scale: np.ndarray  # float32

    def __getitem__(self, index: int) -> Quantized:
        """One of the arrays that are stacked in dim 0: of a layer, or of an expert."""
        return Quantized(self.values[index], self.scale[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    def reshape(self, *shape: int) -> Quantized:
        """Other dims for the values; the scales, one for each entry of the last, in one row."""
        return Quantized(self.values.reshape(shape), self.scale.reshape(1, -1))

    def dequantized(self) -> np.ndarray:
        """The array in float32."""
        return self.values.astype(np.float32) * self.scale


def summed_axes(name: str) -> tuple[int, ...] | None:
    """The axes, from the end, that products with this weight sum over; None: it stays in floats."""
    *parents, leaf = name.split(".")
    if leaf == "table":
        return (-1,)
    attention = any(parent.endswith("attention") for parent in parents)
    if leaf in ("wq", "wk", "wv"):
        return (-3,)
    if leaf in ("wi", "wo"):
        return (-3, -2) if attention else (-2,)
    return None


def quantize(array: np.ndarray, axes: tuple[int, ...]) -> Quantized:
    """The nearest numbers of 8 bits, with one scale along `axes`."""
    array = np.asarray(array, np.float32)
    largest = np.abs(array).max(axis=axes, keepdims=True)
    scale = np.where(largest > 0, largest / MOST, 1.0).astype(np.float32)
    return Quantized(np.rint(array / scale).astype(np.int8), scale)
