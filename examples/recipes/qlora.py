"""QLoRA under FSDP: frozen weights of 8 bits are split, and made wide where they are used.

Only the two small matrices beside each weight are trained, and every device has them.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size

LAYERS, RANK = 4, 8


def dense(x_BM, frozen, adapter):
    wide = frozen["q"].astype(jnp.float32) * frozen["scale"]
    return x_BM @ wide + x_BM @ adapter["down"] @ adapter["up"]


def loss(adapters, frozen, x_BM):
    y_BM = x_BM
    for weights, adapter in zip(frozen, adapters, strict=True):
        hidden = jax.nn.gelu(dense(y_BM, weights["up"], adapter["up"]))
        y_BM = y_BM + dense(hidden, weights["down"], adapter["down"])
    return jnp.mean((y_BM - x_BM) ** 2)


def step(adapters, frozen, x_BM):
    def place(path, w):
        return gshard.split(w, 0, D) if path[-1].key == "q" else gshard.replicate(w)

    frozen = jax.tree_util.tree_map_with_path(place, frozen)
    value, grads = jax.value_and_grad(loss)(adapters, frozen, gshard.split(x_BM, 0, D))
    return jax.tree.map(lambda w, g: w - 1e-3 * g, adapters, grads), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    M, F, B = size.M, size.F, size.B * size.S

    def matrix(n, m):
        f32 = jnp.float32
        q = jax.ShapeDtypeStruct((n, m), jnp.int8)
        down, up = jax.ShapeDtypeStruct((n, RANK), f32), jax.ShapeDtypeStruct((RANK, m), f32)
        return {"q": q, "scale": jax.ShapeDtypeStruct((m,), f32)}, {"down": down, "up": up}

    layers = [{"up": matrix(M, F), "down": matrix(F, M)} for _ in range(LAYERS)]
    frozen, adapters = ([{n: pair[i] for n, pair in w.items()} for w in layers] for i in range(2))
    narrow = nbytes([w["q"] for layer in frozen for w in layer.values()])
    # Gathered once: the gathered weights are kept for the backward pass.
    expert = all_gather(narrow) + all_reduce(nbytes(adapters)) + all_reduce(4)
    batch = jax.ShapeDtypeStruct((B, M), jnp.float32)
    return [Recipe("QLoRA, 8 bits under FSDP", step, (adapters, frozen, batch), expert)]


if __name__ == "__main__":
    show(recipes())
