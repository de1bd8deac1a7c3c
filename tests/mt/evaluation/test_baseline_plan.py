"""The sizes of bilingual models, and settings that make no sense."""

from dataclasses import replace

import pytest

from gshard.errors import UserError
from gshard.mt.evaluation.baseline_plan import SIZES, BaselineConfig
from tests.nn import models


def test_the_papers_sizes():
    run = models.config(model_dim=512, hidden_dim=2048, heads=8, encoder_layers=6, decoder_layers=6)
    large, medium, small = (size.model(run) for size in SIZES)
    assert (large.model_dim, large.hidden_dim, large.heads, large.encoder_layers) == (
        512,
        2048,
        8,
        6,
    )
    assert (medium.model_dim, medium.hidden_dim, medium.encoder_layers) == (256, 1024, 6)
    assert (small.model_dim, small.encoder_layers, small.decoder_layers) == (256, 2, 2)
    assert [m.residual_dropout for m in (large, medium, small)] == [0.1, 0.2, 0.3]
    assert SIZES[1].model(replace(run, model_dim=128)).model_dim == 128


def test_settings_that_make_no_sense():
    with pytest.raises(UserError, match="0 training steps"):
        BaselineConfig(steps=0)
    with pytest.raises(UserError, match="0 models"):
        BaselineConfig(models=0)
