"""Images and texts, each image compared with all texts (CLIP): the pairs of a batch are split.

Two views of each image, compared with all other views (SimCLR): these are concatenated.

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


def of_views(weights, ones_BK, others_BK):
    z_NM = jnp.concatenate([ones_BK @ weights["image"], others_BK @ weights["image"]])
    z_NM = z_NM / jnp.linalg.norm(z_NM, axis=-1, keepdims=True)
    N = len(z_NM)
    scores_NN = jnp.where(jnp.eye(N, dtype=bool), -jnp.inf, z_NM @ z_NM.T / 0.1)
    pairs_N = (z_NM * jnp.roll(z_NM, N // 2, 0)).sum(-1) / 0.1
    return (jax.nn.logsumexp(scores_NN, axis=-1) - pairs_N).mean()


def training(loss):
    def step(weights, *batch):
        halves = (gshard.split(a, 0, D) for a in batch)
        value, grads = jax.value_and_grad(loss)(weights, *halves)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value

    return step


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, K, M = (2048, 64, 128) if size.M < 1024 else (32768, 1024, 1024)
    sizes = {"image": (K, M), "text": (K, M), "scale": ()}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    batch = jax.ShapeDtypeStruct((B, K), jnp.float32)
    # The vectors of the texts and their gradients; of every column the maximum and the sum, and the
    # gradient of the sum; the gradients of the weights, and the loss.
    expert = fully_sharded(4 * B * M) + 3 * all_reduce(4 * B) + all_reduce(nbytes(weights) + 4)
    image = {"image": weights["image"]}
    views = fully_sharded(4 * 2 * B * M) + all_reduce(nbytes(image) + 4)
    return [
        Recipe("images and texts, all pairs", training(loss), (weights, batch, batch), expert),
        Recipe("views of images, all pairs", training(of_views), (image, batch, batch), views),
    ]


if __name__ == "__main__":
    show(recipes())
