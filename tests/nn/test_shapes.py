"""Names and shapes of weights from a configuration, beside those of the model itself."""

import equinox as eqx
import jax
from hypothesis import given
from hypothesis import strategies as st

from gshard.mt.training.weights import named
from gshard.nn.config import GatingConfig, weight_shapes
from gshard.nn.transformer import Transformer
from tests.nn import models


@given(data=st.data())
def test_equal_to_those_of_the_model(data):
    draw = data.draw
    stacked, pairs = draw(st.booleans()), st.integers(1, 3)
    config = models.config(
        experts=draw(st.sampled_from([0, 4])),
        experts_in=draw(st.sampled_from(["both", "encoder"])),
        expert_hidden_dim=draw(st.sampled_from([None, 12])),
        shared_hidden_dim=draw(st.sampled_from([0, 6])),
        gating=GatingConfig(top_k=draw(st.sampled_from([1, 2]))),
        encoder_layers=2 * draw(pairs),
        decoder_layers=2 * draw(pairs),
        key_dim=draw(st.integers(1, 5)),
        value_dim=draw(st.integers(1, 5)),
        biases=draw(st.booleans()),
        experts_every=2 if stacked else draw(st.sampled_from([2, 4])),
        stacked=stacked,
    )
    like = eqx.filter_eval_shape(Transformer, config, jax.random.key(0))
    assert weight_shapes(config) == {name: leaf.shape for name, leaf in named(like).items()}
