"""Data and tensor parallelism on a mesh of 2 x 4 devices; and FSDP instead of data parallelism.

The batch is split along the first mesh axis, heads and hidden units along the second.
"""

import jax
import numpy as np

import gshard
from examples.recipes.recipe import Recipe, all_gather, all_reduce, nbytes, reduce_scatter, show
from examples.recipes.tensor_parallel import SPLIT
from examples.recipes.transformer import SMALL, Size, sgd, shapes, tokens

MESH = np.arange(8).reshape(2, 4)


def assigned(rank, first=None, second=None):
    """The assignment of a tensor with dim `first` along the mesh's first axis, and so on."""
    mesh = MESH if first is not None else MESH[:1]
    mesh = mesh if second is not None else mesh[:, :1]
    tiles = [1] * rank
    for dim, count in ((first, mesh.shape[0]), (second, mesh.shape[1])):
        if dim is not None:
            tiles[dim] = count
    swapped = first is not None and second is not None and second < first
    return (mesh.T if swapped else mesh).reshape(tiles)


def split_params(params, fsdp):
    def place(path, w):
        name = path[-1].key
        second = {"embed": 0, "head": 1, **SPLIT}.get(name)
        free = [d for d in range(w.ndim) if d != second]
        first = free[0] if fsdp else None
        if first is None and second is None:
            return gshard.replicate(w)
        return gshard.shard(w, assigned(w.ndim, first, second))

    return jax.tree_util.tree_map_with_path(place, params)


def step(params, batch, fsdp=False):
    batch = gshard.shard(batch, MESH[:, :1])
    params, value = sgd(split_params(params, fsdp), batch)
    return split_params(params, fsdp), value


def step_fsdp(params, batch):
    return step(params, batch, fsdp=True)


def recipes(size: Size = SMALL) -> list[Recipe]:
    size = size.few_tokens()
    params = shapes(size)
    scales = [params["norm"], *([layer["norm1"], layer["norm2"]] for layer in params["layers"])]
    whole, split = nbytes(scales), (nbytes(params) - nbytes(scales)) / 4
    tensor = (4 * size.L + 2) * all_reduce(size.stream / 2, 4)
    tensor += 3 * all_reduce(size.B * size.S * 4 / 2, 4)
    data = all_reduce(split + whole, 2) + all_reduce(4, 2)
    fsdp = all_gather(split + whole, 2) + reduce_scatter(split + whole, 2) + all_reduce(4, 2)
    return [
        Recipe("data x tensor, 2 x 4", step, (params, tokens(size)), data + tensor),
        Recipe("FSDP x tensor, 2 x 4", step_fsdp, (params, tokens(size)), fsdp + tensor),
    ]


if __name__ == "__main__":
    show(recipes())
