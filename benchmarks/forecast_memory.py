"""Memory forecast against what XLA itself plans, for training steps compiled on this machine.

    python -m benchmarks.forecast_memory

Compiled without LLVM's optimisations, which come after XLA has assigned its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gshard
from benchmarks import pipelines
from benchmarks.forecast_users import cnn, lstm
from benchmarks.llama import Llama

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def step_of(loss: Callable, params: Callable, *shapes, devices: int) -> gshard.Lowered:
    """A training step with Adam that gives its state up, lowered."""
    optimizer = optax.adam(1e-3)

    def step(params, state, *args):
        value, grads = jax.value_and_grad(loss)(params, *args)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    weights = jax.eval_shape(params)
    state = jax.eval_shape(optimizer.init, weights)
    jitted = gshard.jit(step, devices=jax.devices()[:devices], donate_argnums=(0, 1))
    return jitted.lower(weights, state, *shapes)


def cut(x, dim: int, devices: int):
    return gshard.split(x, dim, devices) if devices > 1 else x


def dense(devices: int, remat: bool = False, layers: int = 3, M: int = 128, H: int = 4):
    """A stack of Transformer layers with tied embeddings."""
    V = 512

    def block(x, w):
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, w[n]) for n in "qkv")
        a = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.einsum("bhts,bshd,hdm->btm", a, v, w["o"])
        return x + jax.nn.relu(x @ w["i"]) @ w["j"]

    run = jax.checkpoint(block) if remat else block

    def params():
        heads = {n: jnp.zeros((layers, M, H, M // H)) for n in "qkv"}
        out = {"o": jnp.zeros((layers, H, M // H, M))}
        hidden = {"i": jnp.zeros((layers, M, 4 * M)), "j": jnp.zeros((layers, 4 * M, M))}
        return {"e": jnp.zeros((V, M)), "w": {**heads, **out, **hidden}}

    def loss(params, tokens):
        x = params["e"][cut(tokens, 0, devices)]
        x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, params["w"])
        logits = x @ params["e"].T
        return -jnp.mean(jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens, V))

    return step_of(loss, params, jax.ShapeDtypeStruct((16, 64), jnp.int32), devices=devices)


def moe(devices: int, remat: bool = False, E: int = 8, S: int = 64, M: int = 64, H: int = 256):
    """A stack of the paper's MoE layers."""
    C = 2 * S // E

    def layer(x, w):
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, w["g"]))
        expert = jnp.argmax(gates, -1)
        slot = jax.nn.one_hot(jnp.cumsum(jnp.ones_like(expert), 1) % C, C)
        mask = jax.nn.one_hot(expert, E)[..., None] * slot[..., None, :]
        d = cut(jnp.einsum("gsec,gsm->egcm", mask, x), 0, devices)
        h = jax.nn.relu(jnp.einsum("egcm,emh->egch", d, w["i"]))
        y = cut(jnp.einsum("egch,ehm->gecm", h, w["o"]), 0, devices)
        return x + jnp.einsum("gsec,gecm->gsm", mask * gates[..., None], y)

    run = jax.checkpoint(layer) if remat else layer

    def params():
        experts = {"i": jnp.zeros((4, E, M, H)), "o": jnp.zeros((4, E, H, M))}
        return {"g": jnp.zeros((4, M, E)), **experts}

    def loss(params, x):
        split = {n: cut(params[n], 1, devices) for n in "io"}
        weights = {"g": params["g"], **split}
        x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), cut(x, 0, devices), weights)
        return jnp.mean(x**2)

    return step_of(loss, params, jax.ShapeDtypeStruct((8, S, M), jnp.float32), devices=devices)


def mlp(devices: int, remat: bool = False, stacked: bool = False, D: int = 512, H: int = 2048):
    """Residual layers, written out or under scan."""

    def block(x, w):
        return x + jax.nn.gelu(x @ w[0]) @ w[1]

    run = jax.checkpoint(block) if remat else block

    def loss(params, x):
        x = cut(x, 0, devices)
        if stacked:
            both = jax.tree.map(lambda *a: jnp.stack(a), *params)
            x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, both)
        else:
            for w in params:
                x = run(x, w)
        return jnp.mean(x**2)

    def params():
        return [(jnp.zeros((D, H)), jnp.zeros((H, D))) for _ in range(4)]

    return step_of(loss, params, jax.ShapeDtypeStruct((1024, D), jnp.float32), devices=devices)


def resnet(devices: int, channels: int = 16):
    """Residual convolutions, images cut into strips."""

    def conv(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    def loss(params, x):
        x = cut(x, 2, devices)
        for first, second in params:
            x = x + conv(jax.nn.relu(conv(x, first)), second)
        return jnp.mean(x**2)

    kernel = (3, 3, channels, channels)

    def params():
        return [(jnp.zeros(kernel), jnp.zeros(kernel)) for _ in range(4)]

    shape = jax.ShapeDtypeStruct((8, 32, 32, channels), jnp.float32)
    return step_of(loss, params, shape, devices=devices)


def equinox(devices: int):
    arrays, rest = eqx.partition(eqx.nn.MLP(64, 64, 256, 3, key=jax.random.key(0)), eqx.is_array)

    def loss(arrays, x):
        return jnp.mean(jax.vmap(eqx.combine(arrays, rest))(cut(x, 0, devices)) ** 2)

    return step_of(
        loss, lambda: arrays, jax.ShapeDtypeStruct((2048, 64), jnp.float32), devices=devices
    )


class Net(nnx.Module):
    def __init__(self, rngs, normed: bool):
        self.into = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.LayerNorm(256, rngs=rngs) if normed else lambda x: x
        self.out = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.out(nnx.gelu(self.norm(self.into(x))))


def flax(devices: int, normed: bool = True):
    graph, weights = nnx.split(Net(nnx.Rngs(0), normed))

    def loss(params, x):
        return jnp.mean(nnx.merge(graph, params)(cut(x, 0, devices)) ** 2)

    return step_of(
        loss, lambda: weights, jax.ShapeDtypeStruct((1024, 64), jnp.float32), devices=devices
    )


def llama(devices: int, remat: bool = False):
    model = Llama(remat=remat)

    def loss(params, tokens):
        return model.loss(params, tokens, lambda x: cut(x, 0, devices))

    return step_of(loss, model.params, jax.ShapeDtypeStruct((16, 64), jnp.int32), devices=devices)


def users(make: Callable, devices: int):
    loss, params, shapes = make(lambda x: cut(x, 0, devices))
    return step_of(loss, params, *shapes, devices=devices)


def pipeline(schedule: str):
    """A Transformer in 4 stages; the gradient alone, since weights are not given up."""
    step = pipelines.step_of(4, 8, schedule)
    arguments = pipelines.shapes(pipelines.SMALL, pipelines.SMALL.L)
    return gshard.jit(step, devices=jax.devices()[:4]).lower(*arguments)


PROGRAMS: dict[str, Callable[[], gshard.Lowered]] = {
    "dense, 1 device": partial(dense, 1),
    "dense, 1 device, remat": partial(dense, 1, True),
    "dense, 8 devices": partial(dense, 8),
    "dense, 8 devices, remat": partial(dense, 8, True),
    "MoE, 1 device": partial(moe, 1),
    "MoE, 1 device, remat": partial(moe, 1, True),
    "MoE, 8 devices": partial(moe, 8),
    "MoE, 8 devices, remat": partial(moe, 8, True),
    "MLP, 1 device": partial(mlp, 1),
    "MLP, 1 device, remat": partial(mlp, 1, True),
    "MLP, 8 devices": partial(mlp, 8),
    "stacked MLP, 1 device": partial(mlp, 1, False, True),
    "stacked MLP, 1 device, remat": partial(mlp, 1, True, True),
    "ResNet, 1 device": partial(resnet, 1),
    "ResNet, 8 devices": partial(resnet, 8),
    "Equinox, 1 device": partial(equinox, 1),
    "Equinox, 8 devices": partial(equinox, 8),
    "Flax, 1 device": partial(flax, 1, False),
    "Flax, 8 devices": partial(flax, 8, False),
    "Flax with LayerNorm, 1 device": partial(flax, 1),
    "Flax with LayerNorm, 8 devices": partial(flax, 8),
    "Llama, 1 device": partial(llama, 1),
    "Llama, 1 device, remat": partial(llama, 1, True),
    "Llama, 8 devices": partial(llama, 8),
    "nnx CNN, 1 device": partial(users, cnn, 1),
    "nnx CNN, 8 devices": partial(users, cnn, 8),
    "Equinox LSTM, 1 device": partial(users, lstm, 1),
    "Equinox LSTM, 8 devices": partial(users, lstm, 8),
    "1f1b, 4 stages": partial(pipeline, "1f1b"),
    "zb-h1, 4 stages": partial(pipeline, "zb-h1"),
    "zbv, 4 stages": partial(pipeline, "zbv"),
}


def compare(name: str) -> tuple[int, int]:
    """The bytes on a device by the forecast, and as XLA plans them."""
    lowered = PROGRAMS[name]()
    planned = lowered.compile(QUICK).memory_analysis()
    total = (
        planned.argument_size_in_bytes
        + planned.output_size_in_bytes
        - planned.alias_size_in_bytes
        + planned.temp_size_in_bytes
    )
    return lowered.forecast("cpu").memory_bytes, total


def rows() -> Iterator[str]:
    yield "| training step | forecast, MB | XLA, MB | error |"
    yield "|---|---|---|---|"
    for name in PROGRAMS:
        ours, theirs = compare(name)
        yield f"| {name} | {ours / 1e6:.2f} | {theirs / 1e6:.2f} | {ours / theirs - 1:+.1%} |"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for row in rows():
        print(row, flush=True)
