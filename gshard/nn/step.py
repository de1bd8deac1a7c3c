"""A training step: the loss, its gradient, the update, and the routers' metrics beside it.

With a vocabulary of 32,000 the float32 logits are as large as all weights of some models. They can
be computed for a slice of every sequence at a time (`weighted_nll`), and what the backward pass
needs, the gradients of the activations and of the table, is computed from them at once: nothing is
computed twice. That works because the loss is a sum over tokens with known weights: its cotangent
is a scalar.

A student learns from a teacher's probabilities at every target token: its loss is `1 - share` of
the usual one, by the labels, and `share` of the cross entropy between the teacher's distribution
and its own (Hinton et al., 2015; word-level in Kim and Rush, 2016). Both models have the same
vocabularies, and may differ in everything else.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gshard.nn.config import Batch, Remat, TransformerConfig
from gshard.nn.gating import RouterMetrics
from gshard.nn.hashing import seed_of
from gshard.nn.kernels.vocabulary import fits, log_z_and_grads, reference
from gshard.nn.optimizer import FusedOptimizer
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer


class LossSettings(NamedTuple):
    """Label smoothing; at most how many slices of the logits, as many as divide a sequence.

    With `kernels`, each device of that strategy runs a kernel on the logits of its own sequences,
    if supported.
    """

    smoothing: float
    chunks: int
    kernels: Strategy | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def weighted_nll(
    x_BTM: Array, table_VM: Array, labels_BT: Array, weights_BT: Array, how: LossSettings
) -> Array:
    """The sum of `weights_BT` * -log p(label); the logits are `x_BTM` times the table."""

    def body(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, None]:
        x, labels, weights = chunk
        log_z = jax.nn.logsumexp(logits_of(x, table_VM), axis=-1)
        nll = log_z - _expected_logit(x, table_VM, labels, how.smoothing)
        return total + jnp.sum(nll * weights), None

    slices = tuple(cut(x, how.chunks) for x in (x_BTM, labels_BT, weights_BT))
    return jax.lax.scan(body, jnp.zeros(()), slices)[0]


def _nll_and_grads(
    x_BTM: Array, table_VM: Array, labels_BT: Array, weights_BT: Array, how: LossSettings
) -> tuple[Array, tuple[Array, Array]]:
    def body(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[Any, Array]:
        total, table_grad = carry
        x, labels, weights = chunk
        logits = logits_of(x, table_VM)
        log_z, grad = _log_z_and_grads(logits, labels, weights, x.dtype, how)
        nll = log_z - _expected_logit(x, table_VM, labels, how.smoothing)
        x_grad = jnp.einsum("BTV,VM->BTM", grad, table_VM.astype(x.dtype))
        table_grad = table_grad + jnp.einsum(
            "BTV,BTM->VM", grad, x, preferred_element_type=jnp.float32
        )
        return (total + jnp.sum(nll * weights), table_grad), x_grad

    slices = tuple(cut(x, how.chunks) for x in (x_BTM, labels_BT, weights_BT))
    empty = jnp.zeros(()), jnp.zeros(table_VM.shape, jnp.float32)
    (total, table_grad), x_grads = jax.lax.scan(body, empty, slices)
    x_grad = jnp.moveaxis(x_grads, 0, 1).reshape(x_BTM.shape)
    return total, (x_grad, table_grad.astype(table_VM.dtype))


def _scaled_grads(
    how: LossSettings, grads: tuple[Array, Array], scale: Array
) -> tuple[Array, Array, None, None]:
    x_grad, table_grad = ((scale * grad).astype(grad.dtype) for grad in grads)
    return x_grad, table_grad, None, None


weighted_nll.defvjp(_nll_and_grads, _scaled_grads)


def _log_z_and_grads(
    logits_BTV: Array, labels_BT: Array, weights_BT: Array, dtype: Any, how: LossSettings
) -> tuple[Array, Array]:
    kernels = how.kernels
    if kernels is None or not fits(logits_BTV, kernels.devices):
        return reference(logits_BTV, labels_BT, weights_BT, how.smoothing, dtype)
    B, _, V = logits_BTV.shape
    logits, labels, weights = map(kernels.own_groups, (logits_BTV, labels_BT, weights_BT))
    flat = logits.reshape(-1, V), labels.reshape(-1), weights.reshape(-1)
    log_z, grads = log_z_and_grads(*flat, how.smoothing, dtype)
    shaped = log_z.reshape(labels.shape), grads.reshape(logits.shape)
    return kernels.all_groups(shaped[0], B), kernels.all_groups(shaped[1], B)


def logits_of(x: Array, table_VM: Array) -> Array:
    """The logits in float32."""
    return jnp.einsum(
        "BTM,VM->BTV", x, table_VM.astype(x.dtype), preferred_element_type=jnp.float32
    )


def _expected_logit(x: Array, table_VM: Array, labels: Array, label_smoothing: float) -> Array:
    """The label's logit, its mass smoothed evenly over the vocabulary.

    Straight from the rows of the table: no pass over all logits is needed to pick one of each.
    """
    rows = jnp.take(table_VM, labels, axis=0, mode="clip").astype(x.dtype)
    found = jnp.einsum("BTM,BTM->BT", x, rows, preferred_element_type=jnp.float32)
    if label_smoothing == 0.0:
        return found
    mean_M = jnp.mean(table_VM.astype(jnp.float32), axis=0)
    even = jnp.einsum("BTM,M->BT", x.astype(jnp.float32), mean_M)
    return (1.0 - label_smoothing) * found + label_smoothing * even


def cut(x: Array, chunks: int) -> Array:
    """[B, T, ...] as [chunks, B, T / chunks, ...]: each slice has a part of every sequence."""
    B, T, *rest = x.shape
    count = max(n for n in range(1, chunks + 1) if T % n == 0)
    return jnp.moveaxis(x.reshape(B, count, T // count, *rest), 1, 0)


class Lesson(NamedTuple):
    """What a teacher says of a batch: the logits are the hidden values times the table."""

    hidden: Array  # [B, T, M]
    table: Array  # [V, M]


def lesson(teacher: Transformer, batch: Batch, strategy: Strategy = ONE_DEVICE) -> Lesson:
    """The teacher on a batch, without dropout; nothing is differentiated through it."""
    with jax.named_scope("teacher"):
        x_BTM, _ = teacher.hidden(batch, None, strategy)
        return jax.lax.stop_gradient(Lesson(x_BTM, teacher.target.table))


def teacher_nll(
    x_BTM: Array, table_VM: Array, taught: Lesson, weights_BT: Array, chunks: int
) -> Array:
    """The sum of `weights_BT` * the cross entropy of the student with the teacher's distribution.

    The logits of both are computed in at most `chunks` slices, as many as divide the length of a
    sequence, and again in the backward pass: those of the entire batch are never in memory.
    """

    @jax.checkpoint
    def of_slice(x: Array, table_VM: Array, teacher_x: Array, weights: Array) -> Array:
        log_p = jax.nn.log_softmax(logits_of(x, table_VM), axis=-1)
        teacher_p = jax.nn.softmax(logits_of(teacher_x, taught.table), axis=-1)
        return -jnp.sum(jnp.sum(teacher_p * log_p, axis=-1) * weights)

    def body(total: Array, each: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x, teacher_x, weights = each
        return total + of_slice(x, table_VM, teacher_x, weights), None

    slices = tuple(cut(each, chunks) for each in (x_BTM, taught.hidden, weights_BT))
    return jax.lax.scan(body, jnp.zeros(()), slices)[0]


_ROUNDING = 0x5EED  # folded into the key of a step for the bits that round weights
Optimizer: TypeAlias = optax.GradientTransformation | FusedOptimizer


class TrainState(NamedTuple):
    """All that a training step changes."""

    model: Transformer
    opt_state: Any
    step: Array


class StepMetrics(NamedTuple):
    """What a step reports: mean losses per target token, and each router's own metrics."""

    loss: Array  # what is minimized: nll (or a mean of it and the teacher's) + the routers' losses
    nll: Array
    aux_loss: Array  # sum over the MoE layers, before the coefficient
    z_loss: Array
    tokens: Array  # target tokens that are not padding
    grad_norm: Array
    encoder: RouterMetrics | None
    decoder: RouterMetrics | None


def init_state(
    config: TransformerConfig, optimizer: Optimizer, key: Array, strategy: Strategy = ONE_DEVICE
) -> TrainState:
    """A fresh model and its optimizer state, annotated like the step's."""
    model = strategy.weights(Transformer(config, key), stacked=1)
    opt_state = strategy.update(optimizer.init(model))
    return TrainState(model, opt_state, jnp.zeros((), jnp.int32))


def train_step(
    state: TrainState,
    batch: Batch,
    key: Array,
    *,
    optimizer: Optimizer,
    strategy: Strategy = ONE_DEVICE,
    label_smoothing: float = 0.0,
    teacher: Transformer | None = None,
    teacher_share: float = 0.0,
    remat: Remat | None = None,
) -> tuple[TrainState, StepMetrics]:
    """One update from one batch.

    The key is folded with the step count: one key serves the whole training, and a run that was
    stopped and resumed draws the same numbers. With a `teacher`, `teacher_share` of the loss is
    by its probabilities in the place of the labels. `remat` overrides the config's, which
    `choose_remat` does where that is a budget in bytes.
    """
    model = strategy.weights(state.model, stacked=1)
    opt_state = strategy.update(state.opt_state)
    batch = jax.tree.map(strategy.groups, batch)
    key = jax.random.fold_in(key, state.step)
    taught = None
    if teacher is not None:
        taught = lesson(strategy.weights(teacher, stacked=1), batch, strategy)

    def objective(model: Transformer) -> tuple[Array, StepMetrics]:
        settings = (label_smoothing, remat, taught, teacher_share)
        return loss(model, batch, key, strategy, *settings)

    # JAX differentiates under an empty mesh if there is none: with it from the start, functions
    # under `jax.jit` are traced once, and not again for the backward pass.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        grads, metrics = jax.grad(objective, has_aux=True)(model)
    with jax.named_scope("update"):
        model, opt_state, grad_norm = _updated(grads, model, opt_state, key, optimizer, strategy)
    metrics = metrics._replace(grad_norm=grad_norm)
    return TrainState(model, opt_state, state.step + 1), metrics


def _updated(
    grads: Transformer,
    model: Transformer,
    opt_state: Any,
    key: Array,
    optimizer: Optimizer,
    strategy: Strategy,
) -> tuple[Transformer, Any, Array]:
    """The weights and the optimizer's state after an update, and the length of the gradients."""
    grads = strategy.update(grads)
    if isinstance(optimizer, FusedOptimizer):
        seed = seed_of(jax.random.fold_in(key, _ROUNDING))
        model, opt_state, grad_norm = optimizer.apply(grads, opt_state, model, seed)
    else:
        updates, opt_state = optimizer.update(grads, opt_state, model)
        model, grad_norm = optax.apply_updates(model, updates), _norm(grads)
    return strategy.updated(model), strategy.update(opt_state), grad_norm


def eval_step(model: Transformer, batch: Batch, *, strategy: Strategy = ONE_DEVICE) -> StepMetrics:
    """The losses on a batch with nothing random and the capacity of evaluation."""
    model = strategy.weights(model, stacked=1)
    return loss(model, jax.tree.map(strategy.groups, batch), None, strategy)[1]


def loss(
    model: Transformer,
    batch: Batch,
    key: Array | None = None,
    strategy: Strategy = ONE_DEVICE,
    label_smoothing: float = 0.0,
    remat: Remat | None = None,
    taught: Lesson | None = None,
    teacher_share: float = 0.0,
) -> tuple[Array, StepMetrics]:
    """L = l_nll + k * l_aux (+ k_z * l_z), the routers' losses summed over the MoE layers.

    Summed, not averaged, so that the weight of each router's loss is independent of the depth.
    With what a teacher says of the batch, `teacher_share` of l_nll is by its probabilities.
    """
    x_BTM, routers = model.hidden(batch, key, strategy, remat)
    with jax.named_scope("loss"):
        nll, tokens = _nll(model, x_BTM, batch, strategy, label_smoothing)
        learned = nll
        if taught is not None:
            weights_BT = (batch.target_segments > 0) / jnp.maximum(tokens, 1.0)
            chunks = model.config.loss_chunks
            soft = teacher_nll(x_BTM, model.target.table, taught, weights_BT, chunks)
            learned = (1.0 - teacher_share) * nll + teacher_share * soft
        sides = [r for r in routers if r is not None]
        aux = sum((jnp.sum(r.aux_loss) for r in sides), jnp.zeros(()))
        z = sum((jnp.sum(r.z_loss) for r in sides), jnp.zeros(()))
        gating = model.config.gating
        total = learned + gating.aux_coefficient * aux + gating.z_coefficient * z
        return total, StepMetrics(total, nll, aux, z, tokens, jnp.zeros(()), *routers)


def _nll(
    model: Transformer, x_BTM: Array, batch: Batch, strategy: Strategy, label_smoothing: float
) -> tuple[Array, Array]:
    """The mean -log p(label) from the decoder's last hidden values, and the number of tokens."""
    real_BT = batch.target_segments > 0
    tokens = jnp.sum(real_BT).astype(jnp.float32)
    if model.config.loss_chunks > 1:
        weights_BT = real_BT / jnp.maximum(tokens, 1.0)
        config = model.config
        how = LossSettings(label_smoothing, config.loss_chunks, config.kernels(strategy))
        return weighted_nll(x_BTM, model.target.table, batch.labels, weights_BT, how), tokens
    nll_BT = cross_entropy(model.target.logits(x_BTM), batch.labels, label_smoothing)
    return jnp.sum(nll_BT * real_BT) / jnp.maximum(tokens, 1.0), tokens


def cross_entropy(logits_BTV: Array, labels_BT: Array, label_smoothing: float = 0.0) -> Array:
    """-log p(label), the label's probability mass smoothed evenly over the vocabulary.

    A one-hot product instead of a lookup: it stays local whichever dim of the logits is split.
    """
    V = logits_BTV.shape[-1]
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    labels_BTV = jax.nn.one_hot(labels_BT, V, dtype=logits_BTV.dtype)
    nll_BT = log_z_BT - jnp.sum(logits_BTV * labels_BTV, axis=-1)
    if label_smoothing == 0.0:
        return nll_BT
    even_BT = log_z_BT - jnp.mean(logits_BTV, axis=-1)
    return (1.0 - label_smoothing) * nll_BT + label_smoothing * even_BT


def _norm(tree: Any) -> Array:
    """The length of all gradients as one vector."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros(())))
