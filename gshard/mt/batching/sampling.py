"""Temperature sampling over languages: from data-proportional (1) to uniform (infinity).

The corpus follows a power law: sampled as it is, small languages are hardly ever seen; sampled
uniformly, large ones starve. With counts n, language l gets the share n_l^(1/T) / sum n^(1/T).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gshard.mt.errors import UserError


def temperature_shares(counts: Sequence[int], temperature: float) -> np.ndarray:
    """The share of each language at a temperature; languages without data get none."""
    if not temperature >= 1:
        raise UserError(
            f"temperature {temperature}: 1 samples in proportion to the data, inf uniformly"
        )
    sizes = np.asarray(counts, dtype=np.float64)
    weights = np.where(sizes > 0, np.maximum(sizes, 1) ** (1 / temperature), 0.0)
    if not weights.sum():
        raise UserError("there is nothing to sample from")
    return weights / weights.sum()
