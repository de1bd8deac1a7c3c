"""Training steps as JAX's users write them: a mesh, shardings of arguments, Optax.

Each is a step, its arguments as shapes that lie somewhere, and the bytes that an expert would send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.recipes.recipe import all_gather, all_reduce, nbytes, reduce_scatter

P = PartitionSpec
f32 = jnp.float32
Program = tuple[Callable[..., Any], tuple[Any, ...], float]

M, F, V, N, H = 128, 512, 512, 8, 16  # model and hidden dims, vocabulary, heads and their size
B, T = 32, 64


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def lie(tree: Any, mesh: Mesh, spec: Callable[[str, Any], PartitionSpec]) -> Any:
    """Shapes that lie as `spec` says, of a leaf's name and shape."""

    def place(path, x):
        name = getattr(path[-1], "key", "") if path else ""
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec(str(name), x))
        )

    return jax.tree_util.tree_map_with_path(place, tree)


def shape(*sizes: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def weights(kv_heads: int = N, dtype: Any = f32) -> dict[str, Any]:
    """Those of a GPT of one layer."""
    sizes = {
        "wte": (V, M), "ln1": (M,), "q": (M, N * H), "k": (M, kv_heads * H),
        "v": (M, kv_heads * H), "o": (N * H, M), "ln2": (M,), "fc": (M, F), "b1": (F,),
        "proj": (F, M), "lnf": (M,), "head": (M, V),
    }  # fmt: skip
    return {name: shape(*size, dtype=dtype) for name, size in sizes.items()}


def norm(x, scale):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def logits_of(p, tokens, between: Callable[[Any, str], Any] = lambda x, kind: x):
    x = between(p["wte"][tokens], "stream")
    y = norm(x, p["ln1"])
    q, k, v = (between((y @ p[n]).reshape(*y.shape[:2], -1, H), "heads") for n in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = between(x + y.reshape(*x.shape[:2], -1) @ p["o"], "stream")
    hidden = between(jax.nn.gelu(norm(x, p["ln2"]) @ p["fc"] + p["b1"]), "hidden")
    return norm(between(x + hidden @ p["proj"], "stream"), p["lnf"]) @ p["head"]


def cross_entropy(logits, tokens):
    found = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return found.astype(f32).mean()


def loss(p, tokens):
    return cross_entropy(logits_of(p, tokens), tokens)


def descent(loss: Callable[..., Any] = loss) -> Callable[..., Any]:
    def step(p, *rest):
        value, grads = jax.value_and_grad(loss)(p, *rest)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, p, grads), value

    return step


def fsdp_bytes(params: Any) -> float:
    return all_gather(nbytes(params)) + reduce_scatter(nbytes(params))


def tokens_on(mesh: Mesh, axes: Any, batch: int = B) -> Any:
    return lie(shape(batch, T, dtype=jnp.int32), mesh, lambda *_: P(axes))


def zero1_with_clipping() -> Program:
    """Weights that come and go whole, a state that is split, and a norm of all gradients."""
    mesh = mesh_of(data=8)
    params = lie(weights(), mesh, lambda *_: P())
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = jax.eval_shape(optimizer.init, params)
    state = lie(state, mesh, lambda _, x: P("data") if x.ndim else P())

    def step(p, s, tokens):
        grads = jax.grad(loss)(p, tokens)
        updates, s = optimizer.update(grads, s, p)
        p = optax.apply_updates(p, updates)
        return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, whole), p), s

    whole = NamedSharding(mesh, P())
    return step, (params, state, tokens_on(mesh, "data")), fsdp_bytes(params) + all_reduce(4)


def narrow_copies_of_masters() -> Program:
    """Weights are split in float32, and used, gathered and differentiated in bfloat16."""
    mesh = mesh_of(fsdp=8)
    params = lie(weights(), mesh, lambda *_: P("fsdp"))

    def narrow(p, tokens):
        return loss(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), tokens)

    return descent(narrow), (params, tokens_on(mesh, "fsdp")), fsdp_bytes(params) / 2


def lora() -> Program:
    """Frozen weights are gathered; only the small ones beside them have gradients."""
    mesh = mesh_of(fsdp=8)
    frozen = lie(
        {n: weights()[n] for n in ("wte", "fc", "proj", "head")}, mesh, lambda *_: P("fsdp")
    )
    down, up = shape(M, 8), shape(8, F)
    small = lie({"down": down, "up": up}, mesh, lambda _, x: P("fsdp") if x.shape[0] > 8 else P())

    def adapted(small, frozen, tokens):
        x = frozen["wte"][tokens]
        beside = x @ small["down"] @ small["up"]
        x = x + jax.nn.gelu(x @ frozen["fc"] + beside) @ frozen["proj"]
        return cross_entropy(x @ frozen["head"], tokens)

    expert = (
        all_gather(nbytes(frozen)) + fsdp_bytes(small["down"]) + all_reduce(nbytes(small["up"]))
    )
    return descent(adapted), (small, frozen, tokens_on(mesh, "fsdp")), expert


TENSOR = {
    "wte": P("model"), "q": P(None, "model"), "k": P(None, "model"), "v": P(None, "model"),
    "o": P("model"), "fc": P(None, "model"), "b1": P("model"), "proj": P("model"),
    "head": P(None, "model"),
}  # fmt: skip


def fewer_key_heads_than_devices() -> Program:
    """Tensor parallelism, 8 heads of queries and 2 of keys on 8 devices: each needs a whole one."""
    mesh = mesh_of(model=8)
    params = lie(weights(kv_heads=2), mesh, lambda name, _: TENSOR.get(name, P()))
    stream, keys = 4 * T * M * 4, 4 * T * 2 * H * 4
    expert = 6 * all_reduce(stream) + 2 * (all_gather(keys) + reduce_scatter(keys))
    return descent(), (params, tokens_on(mesh, None, batch=4)), expert


def three_axes() -> Program:
    """Copies x FSDP x tensor parallelism, 2 x 2 x 2, with constraints between the layers."""
    mesh = mesh_of(data=2, fsdp=2, model=2)
    rows = ("data", "fsdp")
    kinds = {"stream": P(rows), "heads": P(rows, None, "model"), "hidden": P(rows, None, "model")}

    def spec(name: str, x: Any) -> PartitionSpec:
        if x.ndim == 1:
            return TENSOR.get(name, P())
        return P("fsdp", "model") if TENSOR[name] == P(None, "model") else P("model", "fsdp")

    def between(x, kind):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, kinds[kind]))

    def constrained(p, tokens):
        return cross_entropy(logits_of(p, tokens, between), tokens)

    params = lie(weights(), mesh, spec)
    large = nbytes([w for w in params.values() if w.ndim == 2])
    small = nbytes([w for w in params.values() if w.ndim == 1])
    within = all_gather(large / 2, 2) + reduce_scatter(large / 2, 2) + all_reduce(large / 4, 2)
    streams = 6 * all_reduce(B // 4 * T * M * 4, 2)
    expert = within + streams + all_reduce(small, 4)
    return descent(constrained), (params, tokens_on(mesh, rows)), expert


def accumulation_in_a_fori_loop() -> Program:
    mesh = mesh_of(data=8)
    params = lie(weights(), mesh, lambda *_: P())
    tokens = lie(shape(4, B, T, dtype=jnp.int32), mesh, lambda *_: P(None, "data"))

    def step(p, tokens):
        def add(i, total):
            grads = jax.grad(loss)(p, tokens[i])
            return jax.tree.map(lambda t, g: t + g / 4, total, grads)

        grads = jax.lax.fori_loop(0, 4, add, jax.tree.map(jnp.zeros_like, p))
        return jax.tree.map(lambda w, g: w - 1e-3 * g, p, grads)

    return step, (params, tokens), all_reduce(nbytes(params))


def convolutions() -> Program:
    """FSDP by output channels; a kernel that is gathered also serves the gradient, backwards."""
    mesh = mesh_of(fsdp=8)
    kernels = {"first": shape(3, 3, 16, 64), "second": shape(3, 3, 64, 64)}
    kernels = lie(kernels, mesh, lambda *_: P(None, None, None, "fsdp"))
    images = lie(shape(64, 32, 32, 16), mesh, lambda *_: P("fsdp"))

    def error(kernels, x):
        for name in ("first", "second"):
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, kernels[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.mean(x**2)

    return descent(error), (kernels, images), fsdp_bytes(kernels)


def pipeline(shift: str, remat: bool = False) -> Program:
    """4 stages x 2 parts of each microbatch; what enters pushes the others one stage on."""
    mesh = mesh_of(stage=4, data=2)
    stages, micro, batch, width = 4, 8, 64, 64
    params = {"a": shape(stages, width, 4 * width), "b": shape(stages, 4 * width, width)}
    params = lie(params, mesh, lambda *_: P("stage"))
    x = lie(shape(micro, batch, width), mesh, lambda *_: P(None, "data"))
    wanted = NamedSharding(mesh, P("stage", "data"))

    def stage(w, x):
        return x + jax.nn.gelu(x @ w["a"]) @ w["b"]

    every_stage = jax.checkpoint(jax.vmap(stage)) if remat else jax.vmap(stage)

    def pushed(state, new):
        if shift == "concatenate":
            return jnp.concatenate([new[None], state[:-1]])
        if shift == "update":
            return jax.lax.dynamic_update_slice(jnp.roll(state, 1, 0), new[None], (0, 0, 0))
        first = jnp.arange(stages)[:, None, None] == 0
        return jnp.where(first, new[None], jnp.pad(state[:-1], ((1, 0), (0, 0), (0, 0))))

    def error(params, x):
        def tick(state, new):
            state = jax.lax.with_sharding_constraint(pushed(state, new), wanted)
            state = every_stage(params, state)
            return state, jnp.mean(state**2, (1, 2))

        entering = jnp.concatenate([x, jnp.zeros((stages - 1, batch, width))])
        _, errors = jax.lax.scan(tick, jnp.zeros((stages, batch, width)), entering)
        return jnp.mean(errors[stages - 1 :, -1])  # every stage has errors, the last the outputs'

    permutes = 2 * (micro + stages - 1) * (batch // 2 * width * 4)
    expert = permutes + all_reduce(nbytes(params) / stages, 2) + all_reduce(1024)
    return descent(error), (params, x), expert


def expert_choice() -> Program:
    """Each of 8 experts takes the 16 tokens of a group that like it best."""
    mesh = mesh_of(expert=8)
    groups, length, width, experts, taken = 16, 64, 64, 8, 16
    params = {"gate": shape(width, experts), "a": shape(experts, width, 256)}
    params["b"] = shape(experts, 256, width)
    params = lie(params, mesh, lambda name, _: P() if name == "gate" else P("expert"))
    x = lie(shape(groups, length, width), mesh, lambda *_: P("expert"))

    def error(p, x):
        scores = jnp.swapaxes(jax.nn.softmax(x @ p["gate"]), 1, 2)
        gates, chosen = jax.lax.top_k(scores, taken)
        inputs = jnp.take_along_axis(x[:, None], chosen[..., None], axis=2)
        hidden = jax.nn.gelu(jnp.einsum("gecm,emf->gecf", inputs, p["a"]))
        out = jnp.einsum("gecf,efm->gecm", hidden, p["b"]) * gates[..., None]

        def put_back(out, chosen):
            return jnp.zeros((length, width)).at[chosen.ravel()].add(out.reshape(-1, width))

        return jnp.mean((x + jax.vmap(put_back)(out, chosen)) ** 2)

    exchanged = groups // 8 * experts * taken * width * 4 * 7 / 8
    return descent(error), (params, x), 3 * exchanged + all_reduce(nbytes(params["gate"]))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "ZeRO-1 with clipping": zero1_with_clipping,
    "narrow copies of masters": narrow_copies_of_masters,
    "LoRA": lora,
    "fewer key heads than devices": fewer_key_heads_than_devices,
    "three axes": three_axes,
    "accumulation in a fori_loop": accumulation_in_a_fori_loop,
    "convolutions": convolutions,
    "pipeline by concatenation, remat": functools.partial(pipeline, "concatenate", remat=True),
    "pipeline by update": functools.partial(pipeline, "update"),
    "pipeline by padding": functools.partial(pipeline, "pad"),
    "expert choice": expert_choice,
}
