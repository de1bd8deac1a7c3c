"""A block of Llama 3 8B under FSDP on 8 GPUs, with one annotation that is wrong.

gshard explain examples.llama_block:block --arguments examples.llama_block:shapes --hardware h100
gshard compare examples.llama_block:block --arguments examples.llama_block:shapes
"""

import jax
import jax.numpy as jnp

import gshard

D, F, HEADS = 4096, 14336, 32


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def block(w, x):  # written for one huge device; x: rows, tokens, D
    w, x = gshard.fsdp(w, 8), gshard.split(x, 2, 8)  # the mistake: D is split, not the rows
    y = norm(x)
    q, k, v = ((y @ w[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    y = norm(x)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def shapes():
    sizes = {"gate": (D, F), "up": (D, F), "down": (F, D), **dict.fromkeys("qkv", (D, D))}
    sizes["out"] = (D, D)
    w = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in sizes.items()}
    return w, jax.ShapeDtypeStruct((16, 4096, D), "bfloat16")
