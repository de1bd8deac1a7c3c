"""The programs of `benchmarks.auto`: each without annotations, and as experts annotate it.

Every case has two sizes: a large one, whose program is forecast and never run, and a small one,
which runs on 8 virtual devices.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from examples import moe_layer, resnet_spatial
from examples.recipes import (
    context_parallel,
    data_parallel,
    experts,
    fsdp,
    sequence_parallel,
    tensor_parallel,
    transformer,
    two_dims,
    unet,
)
from examples.recipes.recipe import D
from examples.recipes.transformer import Size

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A function, arguments for it, and the same function with annotations of experts.

    `memory_of` names the expert whose memory, with 2% to spare, is the limit for all.
    """

    name: str
    fn: Function
    arguments: tuple[Any, ...]
    experts: Mapping[str, Function]
    memory_of: str = ""


def without_annotations(fn: Function) -> Function:
    """The function with its annotations left out."""

    @functools.wraps(fn)
    def bare(*args: Any) -> Any:
        with _no_annotations():
            return fn(*args)

    return bare


@contextlib.contextmanager
def _no_annotations() -> Iterator[None]:
    with mock.patch("gshard.tensors.annotate.annotate", lambda tensor, _: tensor):
        yield


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """The type of a float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# ---------------------------------------------------------------- products


def mlp(small: bool) -> Case:
    """Three hidden layers and a large batch."""
    batch, features, hidden = (128, 32, 64) if small else (65_536, 1024, 4096)
    sizes = [features, hidden, hidden, features]
    weights = [f32(n, m) for n, m in itertools.pairwise(sizes)]

    def loss(weights, x, y):
        for weight in weights[:-1]:
            x = jax.nn.relu(x @ weight)
        return jnp.mean((x @ weights[-1] - y) ** 2)

    def step(weights, x, y):
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    def data(weights, x, y):
        return step(weights, gshard.split(x, 0, D), gshard.split(y, 0, D))

    arguments = weights, f32(batch, features), f32(batch, features)
    return Case("MLP, large batch", step, arguments, {"data parallel": data})


def _transformer(name: str, size: Size, expert_names: tuple[str, ...]) -> Case:
    known = {
        "data parallel": lambda params, batch: transformer.sgd(params, gshard.split(batch, 0, D)),
        "FSDP": fsdp.step,
        "tensor parallel": tensor_parallel.step,
        "sequence parallel": sequence_parallel.step,
        "2 x 4, data and tensor": two_dims.step,
        "2 x 4, FSDP and tensor": two_dims.step_fsdp,
        "context parallel": context_parallel.step,
    }
    arguments = transformer.shapes(size), transformer.tokens(size)
    return Case(name, transformer.sgd, arguments, {n: known[n] for n in expert_names})


_SMALL = Size(L=2, B=8, S=16, M=64, N=8, F=128, V=64)
_LARGE = Size(L=2, B=64, S=1024, M=4096, N=32, F=16384, V=32_000)


def few_tokens(small: bool) -> Case:
    """512 tokens: fewer than the features of any product."""
    size = _SMALL if small else replace(_LARGE, B=4, S=128)
    named = ("tensor parallel", "sequence parallel", "FSDP")
    return _transformer("Transformer, 512 tokens", size, named)


def many_tokens(small: bool) -> Case:
    """65,536 tokens: more than the features of any product."""
    size = _SMALL if small else _LARGE
    named = ("data parallel", "FSDP", "tensor parallel", "sequence parallel")
    return _transformer("Transformer, 65,536 tokens", size, named)


def two_axes(small: bool) -> Case:
    """A batch of 2: it cannot be cut by 8."""
    size = replace(_SMALL, B=2) if small else replace(_LARGE, B=2, S=2048)
    named = ("2 x 4, data and tensor", "2 x 4, FSDP and tensor", "tensor parallel")
    return _transformer("Transformer, 2 sequences", size, named)


def scanned(small: bool) -> Case:
    """The Transformer of 65,536 tokens with its layers in a scan."""
    case = many_tokens(small)
    params, batch = case.arguments

    def data(params, batch):
        return transformer.sgd(params, gshard.split(batch, 0, D))

    def split(params):  # the first dim of a stack is the loop's
        layers = jax.tree.map(lambda w: gshard.split(w, 1, D), params["layers"])
        return fsdp.split_all(params | {"layers": []}) | {"layers": layers}

    def sharded(params, batch):
        params, value = data(split(params), batch)
        return split(params), value

    arguments = transformer.stacked(params), batch
    name = "Transformer, 65,536 tokens, scan"
    return Case(name, transformer.sgd, arguments, {"data parallel": data, "FSDP": sharded})


def tight(small: bool) -> Case:
    """Adam's state does not fit on a device."""
    size = _SMALL if small else replace(_LARGE, B=16)
    params, batch = transformer.shapes(size), transformer.tokens(size)

    def step(params, moments, batch):
        value, grads = jax.value_and_grad(transformer.loss)(params, batch)
        params, moments = transformer.adam(params, moments, grads)
        return params, moments, value

    def sharded(params, moments, batch):
        state = fsdp.split_all((params, moments))
        params, moments, value = step(*state, gshard.split(batch, 0, D))
        return fsdp.split_all(params), fsdp.split_all(moments), value

    def zero1(params, moments, batch):
        params, moments, value = step(params, fsdp.split_all(moments), gshard.split(batch, 0, D))
        return params, fsdp.split_all(moments), value

    arguments = params, (params, params), batch
    found = {"FSDP": sharded, "ZeRO-1": zero1, "data parallel": data_parallel.step}
    return Case("Transformer, Adam, memory of FSDP", step, arguments, found, "FSDP")


def moe(small: bool) -> Case:
    """The paper's MoE layer."""
    S, M, H = (64, 32, 64) if small else (4096, 1024, 8192)
    arguments = tuple(moe_layer.shapes(D, S, M, H))
    bare = without_annotations(experts.step)
    return Case("MoE layer, training", bare, arguments, {"groups and experts": experts.step})


def long_sequence(small: bool) -> Case:
    """One sequence, and attention is most of the work."""
    size = replace(_SMALL, B=1, L=1, S=64)
    if not small:
        size = Size(L=1, B=1, S=32_768, M=1024, N=16, F=4096, V=1000)
    named = ("context parallel", "tensor parallel", "sequence parallel")
    return _transformer("attention, 32,768 tokens", size, named)


# ---------------------------------------------------------------- images and tables


def resnet(small: bool) -> Case:
    """A ResNet on two images."""
    shape = (2, 64, 64, 3) if small else (2, 1024, 1024, 3)
    channels = resnet_spatial.CHANNELS if small else (64, 128, 256)
    init = functools.partial(resnet_spatial.init, channels=channels)
    weights = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    labels = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    by_mesh = {
        "width by 8": functools.partial(resnet_spatial.train_step, mesh=[list(range(8))]),
        "2 x 4": functools.partial(resnet_spatial.train_step, mesh=np.arange(8).reshape(2, 4)),
    }
    return Case(
        "ResNet, 2 images", resnet_spatial.train_step, (weights, f32(*shape), labels), by_mesh
    )


def u_net(small: bool) -> Case:
    """A U-Net on images, forwards."""
    (recipe,) = unet.recipes(transformer.SMALL if small else transformer.LARGE)
    bare = without_annotations(recipe.step)

    def by_batch(kernels, images):
        return bare(kernels, gshard.split(images, 0, D))

    found = {"rows by 8": recipe.step, "batch by 8": by_batch}
    return Case("U-Net, 8 images, forwards", bare, recipe.arguments, found)


def dlrm(small: bool) -> Case:
    """Large tables of embeddings, small products."""
    tables, rows, width, batch = (8, 64, 8, 32) if small else (8, 1_000_000, 128, 65_536)
    params = {
        "tables": f32(tables, rows, width),
        "bottom": f32(16, width),
        "top": [f32((tables + 1) * width, 512), f32(512, 1)],
    }

    def loss(params, dense, ids, labels):
        looked_up = jax.vmap(lambda table, rows: table[rows])(params["tables"], ids)
        x = jax.nn.relu(dense @ params["bottom"])
        x = jnp.concatenate([x[None], looked_up]).transpose(1, 0, 2).reshape(x.shape[0], -1)
        x = jax.nn.relu(x @ params["top"][0]) @ params["top"][1]
        return jnp.mean(jnp.logaddexp(0.0, x[:, 0]) - labels * x[:, 0])

    def step(params, dense, ids, labels):
        grads = jax.grad(loss)(params, dense, ids, labels)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    def placed(cut, params, dense, ids, labels):
        params = params | {"tables": gshard.split(params["tables"], cut, D)}
        dense, labels = gshard.split(dense, 0, D), gshard.split(labels, 0, D)
        return step(params, dense, ids, labels)

    ids = jax.ShapeDtypeStruct((tables, batch), jnp.int32)
    arguments = params, f32(batch, 16), ids, f32(batch)
    found = {
        "tables and batch": functools.partial(placed, 0),
        "rows and batch": functools.partial(placed, 1),
        "columns and batch": functools.partial(placed, 2),
    }
    return Case("DLRM", step, arguments, found)


# ---------------------------------------------------------------- models of libraries


def equinox(small: bool) -> Case:
    """Equinox's MLP, as its users write a step."""
    import equinox as eqx

    width, batch = (32, 64) if small else (4096, 32_768)
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(width, width, width, 3, key=jax.random.key(0)))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params, x, y):
        model = eqx.combine(params, static)
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    return _library("Equinox MLP", loss, params, (f32(batch, width), f32(batch, width)))


def flax(small: bool) -> Case:
    """A convolutional network of Flax."""
    from flax import linen

    class Network(linen.Module):
        """Three convolutions and a product."""

        @linen.compact
        def __call__(self, x):
            for channels in (8, 16, 16) if small else (64, 128, 256):
                x = linen.relu(linen.Conv(channels, (3, 3), strides=(2, 2))(x))
            return linen.Dense(10)(x.mean((1, 2)))

    batch, width = (16, 32) if small else (512, 256)
    images, labels = f32(batch, width, width, 3), jax.ShapeDtypeStruct((batch,), jnp.int32)
    network = Network()
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(network.init, key, images)

    def loss(params, x, y):
        logits = jax.nn.log_softmax(network.apply(params, x))
        return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(y, 10), -1))

    return _library("Flax convolutions", loss, params, (images, labels))


def haiku(small: bool) -> Case:
    """Haiku's MLP."""
    import haiku as hk

    width, batch = (32, 64) if small else (4096, 256)
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([4 * width, 4 * width, width])(x))
    )
    x = f32(batch, width)
    params = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)), x)

    def loss(params, x, y):
        return jnp.mean((network.apply(params, x) - y) ** 2)

    def tensor(params, x, y):
        cut = dict(params)
        for number, dim in ((0, 1), (1, 0)):
            name = f"mlp/~/linear_{number}"
            cut[name] = {**params[name], "w": gshard.split(params[name]["w"], dim, D)}
        return _step(loss)(cut, x, y)

    case = _library("Haiku MLP, few rows", loss, params, (x, x))
    return replace(case, experts={**case.experts, "tensor parallel": tensor})


def _step(loss: Function) -> Function:
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def _library(name: str, loss: Function, params: Any, batch: tuple[Any, ...]) -> Case:
    """Training of a model that knows nothing of gshard, with the batch split by hand."""
    step = _step(loss)

    def data(params, *batch):
        return step(params, *(gshard.split(x, 0, D) for x in batch))

    def sharded(params, *batch):
        params = jax.tree.map(lambda w: gshard.split(w, 0, D), params)
        return step(params, *(gshard.split(x, 0, D) for x in batch))

    return Case(name, step, (params, *batch), {"data parallel": data, "FSDP": sharded})


CASES: tuple[Callable[[bool], Case], ...] = (
    mlp, few_tokens, many_tokens, scanned, two_axes, tight, moe, resnet, dlrm, long_sequence,
    u_net, equinox, flax, haiku,
)  # fmt: skip
