"""Distillation: a student learns from a teacher's probabilities at every target token.

The loss of a student is `1 - share` of the usual one, by the labels, and `share` of the cross
entropy between the teacher's distribution and its own (Hinton et al., 2015; word-level in Kim and
Rush, 2016). Both models have the same vocabularies, and may differ in everything else.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.config import Batch
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer
from gshard.nn.vocabulary_loss import cut, logits_of


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
