"""What experts learnt: how much the choice of experts tells about the language, and who shares.

From the loads of the experts by language (`evaluation.json`), layer by layer. With every language
as likely as any other, the mutual information between language and expert is 0 bits if all
languages use the experts alike, and log2 of the number of experts at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Shares = Mapping[str, Sequence[Sequence[float]]]  # by task: for each layer, each expert's share


@dataclass(frozen=True)
class LayerUse:
    """One layer of experts: bits about the language, and each language's nearest other one."""

    side: str
    layer: int
    bits: float
    nearest: dict[str, str]


def layers_of(experts: Mapping[str, Shares]) -> list[LayerUse]:
    """Every layer with experts, the encoder's first."""
    found = []
    for side in ("encoder", "decoder"):
        tasks = sorted(experts.get(side, {}))
        if len(tasks) < 2:
            continue
        shares_TLE = np.array([experts[side][task] for task in tasks], np.float64)
        for layer in range(shares_TLE.shape[1]):
            shares_TE = shares_TLE[:, layer]
            shares_TE = shares_TE / np.maximum(shares_TE.sum(axis=1, keepdims=True), 1e-12)
            nearest = [tasks[place] for place in nearest_other(shares_TE)]
            pairs = dict(zip(tasks, nearest, strict=True))
            found.append(LayerUse(side, layer, information(shares_TE), pairs))
    return found


def information(shares_TE: np.ndarray) -> float:
    """The mutual information of language and expert in bits, all languages equally likely."""
    mean_E = shares_TE.mean(axis=0)
    ratio_TE = np.divide(shares_TE, mean_E, out=np.ones_like(shares_TE), where=shares_TE > 0)
    return float(np.mean(np.sum(shares_TE * np.log2(ratio_TE), axis=1)))


def nearest_other(shares_TE: np.ndarray) -> list[int]:
    """For each language the other one that uses the experts most alike, by the cosine."""
    unit_TE = shares_TE / np.maximum(np.linalg.norm(shares_TE, axis=1, keepdims=True), 1e-12)
    alike_TT = unit_TE @ unit_TE.T
    np.fill_diagonal(alike_TT, -np.inf)
    return [int(place) for place in alike_TT.argmax(axis=1)]
