"""Distillation: the loss against its formula, its gradients, and a step on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard.nn import Strategy, TrainState, adam, loss, train_step
from gshard.nn.step import Lesson, lesson, teacher_nll
from tests.nn import models
from tests.oracle import kinds


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_formula(x, table, taught, weights):
    """Token by token: -sum over the vocabulary of p_teacher * log p_student."""
    total = 0.0
    for b, t in np.ndindex(weights.shape):
        teacher = np.exp(log_softmax(taught.hidden[b, t] @ taught.table.T))
        total -= weights[b, t] * (teacher * log_softmax(x[b, t] @ table.T)).sum()
    return total


def example(B=2, T=6, M=4, N=3, V=11, seed=0):
    rng = np.random.default_rng(seed)
    x, teacher_x = rng.normal(size=(B, T, M)), rng.normal(size=(B, T, N))
    table, teacher_table = rng.normal(size=(V, M)), rng.normal(size=(V, N))
    arrays = (x, table, teacher_x, teacher_table, rng.random((B, T)))
    x, table, teacher_x, teacher_table, weights = (a.astype(np.float32) for a in arrays)
    return x, table, Lesson(teacher_x, teacher_table), weights


@given(T=st.integers(1, 7), chunks=st.integers(1, 5), V=st.integers(2, 9), seed=st.integers(0, 9))
def test_the_loss_is_that_of_the_formula(T, chunks, V, seed):
    x, table, taught, weights = example(T=T, V=V, seed=seed)
    found = teacher_nll(x, table, taught, weights, chunks)
    np.testing.assert_allclose(found, by_formula(x, table, taught, weights), rtol=1e-5)


@pytest.mark.slow
def test_gradients_in_slices_are_those_of_all_logits_at_once():
    x, table, taught, weights = example()
    found = jax.grad(teacher_nll, (0, 1))(x, table, taught, weights, 3)

    def at_once(x, table):
        log_p = jax.nn.log_softmax(x @ table.T)
        return -jnp.sum(jax.nn.softmax(taught.hidden @ taught.table.T) * log_p * weights[..., None])

    for a, b in zip(found, jax.grad(at_once, (0, 1))(x, table), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    """The cross entropy with one's own distribution is stationary."""
    model = models.model(models.config(experts=0))
    batch = models.batch()
    taught = lesson(model, batch)

    def soft(model):
        return loss(model, batch, taught=taught, teacher_share=1.0)[0]

    for leaf in jax.tree.leaves(jax.jit(jax.grad(soft))(model)):
        np.testing.assert_allclose(leaf, 0, atol=1e-6)


@pytest.mark.slow
def test_the_share_mixes_labels_and_teacher():
    model, teacher = (models.model(models.config(experts=0), seed) for seed in (0, 1))
    batch = models.batch()
    taught = lesson(teacher, batch)
    totals = [float(loss(model, batch, taught=taught, teacher_share=s)[0]) for s in (0, 0.25, 1)]
    assert totals[1] == pytest.approx(0.75 * totals[0] + 0.25 * totals[2], rel=1e-5)
    assert totals[0] == pytest.approx(float(loss(model, batch)[0]), rel=1e-6)
    real = batch.target_segments > 0
    (mine, _), (its, _) = model(batch), teacher(batch)
    cross = -jnp.sum(jax.nn.softmax(its) * jax.nn.log_softmax(mine), axis=-1)
    assert totals[2] == pytest.approx(float(jnp.sum(cross * real) / real.sum()), rel=1e-5)


@pytest.mark.slow
def test_eight_devices_distil_like_one():
    """The experts of the teacher are split over the devices, and the student is replicated."""
    optimizer = adam(1e-2)
    student = models.model(models.config(experts=0))
    teacher = models.model(models.config(experts=8, groups=8), seed=1)
    state = TrainState(student, optimizer.init(student), jnp.zeros((), jnp.int32))
    batch, key = models.batch(B=8), jax.random.key(0)

    def step(strategy, state, batch, key, teacher):
        settings = {"teacher": teacher, "teacher_share": 0.7, "strategy": strategy}
        return train_step(state, batch, key, optimizer=optimizer, **settings)

    wanted, _ = jax.jit(functools.partial(step, Strategy()))(state, batch, key, teacher)
    lowered = gshard.jit(functools.partial(step, Strategy(8))).lower(state, batch, key, teacher)
    found, _ = lowered.compile()(state, batch, key, teacher)
    for a, b in zip(jax.tree.leaves(found.model), jax.tree.leaves(wanted.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    # The teacher goes forwards alone: two exchanges for each of its layers with experts.
    assert kinds(lowered)["all_to_all"] == 4
