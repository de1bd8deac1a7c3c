"""The Mixture-of-Experts Transformer of the paper's sections 2 and 3.1."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from gshard import _lazy

if _TYPE_CHECKING:
    from gshard.nn.attention import Attention, KeysValues, segment_mask
    from gshard.nn.config import Batch, GatingConfig, TransformerConfig, choose_remat
    from gshard.nn.experts import Experts, MoE
    from gshard.nn.family import FAMILY, Model
    from gshard.nn.gating import Routed, RouterMetrics, Routing, route
    from gshard.nn.layers import Embedding, FeedForward, LayerNorm
    from gshard.nn.optimizer import adafactor, adam, inverse_sqrt, per_matrix
    from gshard.nn.pair import PairCache
    from gshard.nn.step import (
        StepMetrics,
        TrainState,
        cross_entropy,
        eval_step,
        init_state,
        loss,
        train_step,
    )
    from gshard.nn.strategy import Strategy
    from gshard.nn.transformer import ModelMetrics, ModelRoutings, Transformer

__all__ = [
    "FAMILY",
    "Attention",
    "Batch",
    "Embedding",
    "Experts",
    "FeedForward",
    "GatingConfig",
    "KeysValues",
    "LayerNorm",
    "MoE",
    "Model",
    "ModelMetrics",
    "ModelRoutings",
    "PairCache",
    "Routed",
    "RouterMetrics",
    "Routing",
    "StepMetrics",
    "Strategy",
    "TrainState",
    "Transformer",
    "TransformerConfig",
    "adafactor",
    "adam",
    "choose_remat",
    "cross_entropy",
    "eval_step",
    "init_state",
    "inverse_sqrt",
    "loss",
    "per_matrix",
    "route",
    "segment_mask",
    "train_step",
]

_lazy.attach(
    "gshard.nn",
    {
        "gshard.nn.attention": "Attention KeysValues segment_mask",
        "gshard.nn.config": "Batch GatingConfig TransformerConfig choose_remat",
        "gshard.nn.experts": "Experts MoE",
        "gshard.nn.family": "FAMILY Model",
        "gshard.nn.gating": "Routed RouterMetrics Routing route",
        "gshard.nn.layers": "Embedding FeedForward LayerNorm",
        "gshard.nn.optimizer": "adafactor adam inverse_sqrt per_matrix",
        "gshard.nn.pair": "PairCache",
        "gshard.nn.step": (
            "StepMetrics TrainState cross_entropy eval_step init_state loss train_step"
        ),
        "gshard.nn.strategy": "Strategy",
        "gshard.nn.transformer": "ModelMetrics ModelRoutings Transformer",
    },
)
