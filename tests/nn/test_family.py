import functools

import jax
import jax.numpy as jnp
import pytest

from gshard.nn import FAMILY, TrainState, Transformer, adafactor, train_step

MOE = [name for name in FAMILY if name.startswith("moe_")]


@pytest.mark.parametrize("name", MOE)
def test_weights_are_the_papers(name):
    model = FAMILY[name]
    assert abs(model.weights / 2**30 / model.paper_weights - 1) < 0.05
    experts = {"2048e_36l": 36_864, "2048e_12l": 12_288, "512e_36l": 9216, "512e_12l": 3072,
               "128e_36l": 2304, "128e_12l": 768, "2048e_60l": 61_440}  # fmt: skip
    stacks = (model.shapes.encoder, model.shapes.decoder)
    total = sum(s.sparse.moe.experts.wi.shape[0] * model.config.experts for s in stacks)
    assert total == experts[name.removeprefix("moe_")]


def test_dense_model_is_the_papers():
    assert abs(FAMILY["t_96l"].weights / 1e9 / 2.3 - 1) < 0.05
    assert FAMILY["t_96l"].shapes.encoder.sparse.moe is None


def test_weights_count_what_is_there():
    model = FAMILY["tiny"]
    shapes = jax.eval_shape(lambda k: Transformer(model.config, k), jax.random.key(0))
    assert model.weights == sum(x.size for x in jax.tree.leaves(shapes))


def state_shapes(model, optimizer):
    zero = jnp.zeros((), jnp.int32)
    return jax.eval_shape(lambda m: TrainState(m, optimizer.init(m), zero), model.shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe_128e_12l", "moe_2048e_36l"])
def test_training_step_traces_from_shapes_alone(name):
    model, optimizer = FAMILY[name], adafactor()
    step = functools.partial(train_step, optimizer=optimizer, strategy=model.strategy)
    state = state_shapes(model, optimizer)
    after, metrics = jax.eval_shape(step, state, model.batch, jax.random.key(0))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    layers = model.config.encoder_layers // 2
    assert metrics.encoder.load.shape == (layers, model.config.experts)
