"""The copies that come with an exchange, for a bound.

An AllToAll sends and receives pieces that are contiguous. What a matrix product wrote is transposed
for it unless the dim that is to be split comes first, and what arrives is transposed for the
product that reads it unless the dim that was split does. A program's own transpose between the two
products replaces one of these. Pointwise operators would do the same on the way, at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gshard.autosharding.specs import NONE, MeshShape, Spec, local_shape


def transposes(
    shape: tuple[int, ...], dims: Sequence[int] | None, here: Spec, there: Spec, mesh: MeshShape
) -> int:
    """How often the tiles of a tensor are copied to get it from one spec to another.

    `dims` are given of a tensor that is transposed from what a product wrote: the dims of that one.
    Several axes that move between the same dims are one exchange.
    """
    ends = zip(here, there, mesh, strict=True)
    changed = {(own, other) for own, other, size in ends if size > 1 and own != other}
    if len(changed) != 1 or NONE in (found := changed.pop()):
        return 0
    given, taken = found
    sent, received = local_shape(shape, here, mesh), local_shape(shape, there, mesh)
    written = range(len(shape)) if dims is None else dims
    leads = math.prod(n for n, d in zip(sent, written, strict=True) if d < written[taken]) == 1
    stays = math.prod(received[:given]) == 1
    if dims is None:
        return (not leads) + (not stays)
    return int(not (leads or stays))
