"""How the model is sharded: every annotation of `gshard.nn`, in one place.

The paper's strategy (section 3.2): groups split, experts split, the gate replicated; everything
else is inferred. Another strategy is another `Strategy`; the model does not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from gshard.manual import auto_to_manual_spmd_partition, manual_to_auto_spmd_partition
from gshard.tensors.annotate import replicate, shard, split

# The dim of a single layer's weight that `tensor` splits: the hidden dim, or the heads.
_TENSOR_DIM: dict[tuple[str, ...], int] = {
    ("experts", "wi"): 2,
    ("experts", "wo"): 1,
    ("feed_forward", "wi"): 1,
    ("feed_forward", "wo"): 0,
    **{
        (f"{kind}_attention", name): 0 if name == "wo" else 1
        for kind in ("self", "cross")
        for name in ("wq", "wk", "wv", "wo")
    },
}


@dataclass(frozen=True)
class Strategy:
    """The devices as an `expert` x `tensor` grid, and the annotations that follow from it.

    - `Strategy(D)` is the paper's: D groups of tokens, experts over D devices.
    - `Strategy(D // t, t)` also splits the hidden dim of each feed-forward layer and expert, and
      the heads of each attention, t ways.
    - `split_update=True` is weight-update sharding: weights that are replicated keep their
      gradients and optimizer state split over all devices, and are gathered after the update.
    - `Strategy(D, stages=s, microbatches=m)` runs both stacks as pipelines (`gshard.pipeline`), in
      which a layer is on D // s devices, under `inside`.

    On one device there are no annotations: the model is plain JAX.
    """

    expert: int = 1
    tensor: int = 1
    split_update: bool = False
    stages: int = 1
    microbatches: int = 0  # 0: no pipeline

    @property
    def inside(self) -> Strategy:
        """The strategy on the devices of one stage."""
        return replace(self, expert=self.expert // self.stages, stages=1)

    @property
    def devices(self) -> int:
        """The number of devices that the grid has."""
        return self.expert * self.tensor

    def groups(self, x: Array) -> Array:
        """Split dim 0, the groups (or the sequences of the batch), over all devices."""
        return x if self.devices == 1 else split(x, 0, self.devices)

    def own_groups(self, x: Array) -> Array:
        """The groups of this device: enters a manual region (section 3.2), but in a pipeline."""
        if self.devices == 1 or self.microbatches:
            return x
        return auto_to_manual_spmd_partition(self.groups(x))

    def all_groups(self, x: Array, count: int) -> Array:
        """The tensor of `count` groups, `x` being those of this device: leaves the region."""
        if self.devices == 1 or self.microbatches:
            return x
        split_groups = np.arange(self.devices).reshape(-1, *[1] * (x.ndim - 1))
        return manual_to_auto_spmd_partition(x, split_groups, (count, *x.shape[1:]))

    def experts(self, x: Array, dim: int = 0) -> Array:
        """Split the expert dim; along `tensor` the devices hold copies."""
        return self._grid(x, dim, None)

    def replicated(self, x: Array) -> Array:
        """Replicate `x`."""
        return x if self.devices == 1 else replicate(x)

    def weights(self, tree: Any, stacked: int = 0) -> Any:
        """Annotate the weights in `tree`: experts split, the gate replicated, the rest inferred.

        `stacked` is 1 for entire models, in which the weights of all layers may be stacked along
        dim 0. It also applies to the optimizer state of those weights, which has the same paths.
        """
        return self._each(tree, lambda path, leaf: self._weight(path, leaf, stacked))

    def update(self, tree: Any) -> Any:
        """With `split_update`, split the gradients or optimizer state of replicated weights."""
        return self._each(tree, self._update) if self.split_update else self.weights(tree, 1)

    def updated(self, tree: Any) -> Any:
        """The annotations of the weights after an update, the same as before it."""

        def annotated(path: Any, leaf: Array) -> Array:
            split = "experts" in names_along(path) or self.tensor > 1
            return self._weight(path, leaf, 1) if split else replicate(leaf)

        return self._each(tree, annotated) if self.split_update else self.weights(tree, 1)

    def _each(self, tree: Any, annotated: Callable[[Any, Array], Array]) -> Any:
        alone = self.devices == 1
        return tree if alone else jax.tree_util.tree_map_with_path(annotated, tree)

    def _weight(self, path: Any, leaf: Array, stacked: int) -> Array:
        names = names_along(path)
        if self.stages > 1 and ("encoder" in names or "decoder" in names):
            return leaf  # where its stage is, which the pipeline says
        stacked = stacked and not _written_out(path)
        if "gate" in names:
            return replicate(leaf)
        tensor_dim = _TENSOR_DIM.get(names[-2:]) if self.tensor > 1 else None
        hidden = None if tensor_dim is None else tensor_dim + stacked
        if "experts" in names and leaf.ndim > stacked:
            return self._grid(leaf, stacked, hidden)
        return leaf if hidden is None else self._grid(leaf, None, hidden)

    def _update(self, path: Any, leaf: Array) -> Array:
        names = names_along(path)
        if "experts" in names or (self.tensor > 1 and names[-2:] in _TENSOR_DIM):
            return self._weight(path, leaf, 1)
        if not leaf.size > self.devices:
            return leaf
        return split(leaf, int(np.argmax(leaf.shape)), self.devices)

    def _grid(self, x: Array, expert_dim: int | None, tensor_dim: int | None) -> Array:
        """Split `expert_dim` over the rows of the device grid and `tensor_dim` over its columns."""
        if self.devices == 1:
            return x
        if self.tensor == 1:
            return x if expert_dim is None else split(x, expert_dim, self.devices)
        grid = np.arange(self.devices).reshape(self.expert, self.tensor)
        tiles = [1] * x.ndim
        if expert_dim is None:
            grid = grid[:1, :]
        else:
            tiles[expert_dim] = self.expert
        if tensor_dim is None:
            grid = grid[:, :1]
        else:
            tiles[tensor_dim] = self.tensor
        if expert_dim is not None and tensor_dim is not None and tensor_dim < expert_dim:
            grid = grid.T
        return shard(x, grid.reshape(tiles))


ONE_DEVICE = Strategy()


def names_along(path: Any) -> tuple[str, ...]:
    """The attribute names along a path in a tree of modules."""
    return tuple(k.name for k in path if hasattr(k, "name"))


def stacked_dims(path: Any) -> int:
    """How many leading dims of the weight at `path` of a model count layers or experts."""
    names = names_along(path)
    layers = ("encoder" in names or "decoder" in names) and not _written_out(path)
    return layers + ("experts" in names)


def _written_out(path: Any) -> bool:
    """Whether the pairs of the stack at `path` have arrays of their own, each under its number."""
    return any(
        getattr(key, "name", None) in ("encoder", "decoder") and hasattr(inner, "idx")
        for key, inner in itertools.pairwise(path)
    )
