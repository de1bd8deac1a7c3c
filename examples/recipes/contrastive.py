"""Images and texts, each image compared with all texts (CLIP): the pairs of a batch are split.

The vectors of all texts are gathered, and their gradients scattered. A row of scores, of one image,
is on one device; a column, of one text, is on all: their maxima and sums are reduced.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, fully_sharded, nbytes, show
from examples.recipes.transformer import SMALL, Size


def loss(weights, images_BK, texts_BK):
    a_BM, b_BM = images_BK @ weights["image"], texts_BK @ weights["text"]
    a_BM, b_BM = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a_BM, b_BM))
    scores_BB = jnp.exp(weights["scale"]) * a_BM @ b_BM.T
    by_image, by_text = (jax.nn.log_softmax(scores_BB, axis) for axis in (1, 0))
    return -(jnp.diagonal(by_image) + jnp.diagonal(by_text)).mean() / 2


def step(weights, images_BK, texts_BK):
    batch = (gshard.split(a, 0, D) for a in (images_BK, texts_BK))
    value, grads = jax.value_and_grad(loss)(weights, *batch)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, K, M = (2048, 64, 128) if size.M < 1024 else (32768, 1024, 1024)
    sizes = {"image": (K, M), "text": (K, M), "scale": ()}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    batch = jax.ShapeDtypeStruct((B, K), jnp.float32)
    # The vectors of the texts and their gradients; of every column the maximum and the sum, and the
    # gradient of the sum; the gradients of the weights, and the loss.
    expert = fully_sharded(4 * B * M) + 3 * all_reduce(4 * B) + all_reduce(nbytes(weights) + 4)
    return [Recipe("images and texts, all pairs", step, (weights, batch, batch), expert)]


if __name__ == "__main__":
    show(recipes())
