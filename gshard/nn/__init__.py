"""The Mixture-of-Experts Transformer of the paper's sections 2 and 3.1."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from gshard import _lazy

if _TYPE_CHECKING:
    from gshard.nn.attention import Attention as Attention
    from gshard.nn.attention import KeysValues as KeysValues
    from gshard.nn.attention import segment_mask as segment_mask
    from gshard.nn.config import Batch as Batch
    from gshard.nn.config import GatingConfig as GatingConfig
    from gshard.nn.config import TransformerConfig as TransformerConfig
    from gshard.nn.config import choose_remat as choose_remat
    from gshard.nn.experts import Experts as Experts
    from gshard.nn.experts import MoE as MoE
    from gshard.nn.family import FAMILY as FAMILY
    from gshard.nn.family import Model as Model
    from gshard.nn.gating import Routed as Routed
    from gshard.nn.gating import RouterMetrics as RouterMetrics
    from gshard.nn.gating import Routing as Routing
    from gshard.nn.gating import route as route
    from gshard.nn.layers import Embedding as Embedding
    from gshard.nn.layers import FeedForward as FeedForward
    from gshard.nn.layers import LayerNorm as LayerNorm
    from gshard.nn.optimizer import adafactor as adafactor
    from gshard.nn.optimizer import adam as adam
    from gshard.nn.optimizer import inverse_sqrt as inverse_sqrt
    from gshard.nn.optimizer import per_matrix as per_matrix
    from gshard.nn.pair import PairCache as PairCache
    from gshard.nn.step import StepMetrics as StepMetrics
    from gshard.nn.step import TrainState as TrainState
    from gshard.nn.step import cross_entropy as cross_entropy
    from gshard.nn.step import eval_step as eval_step
    from gshard.nn.step import init_state as init_state
    from gshard.nn.step import loss as loss
    from gshard.nn.step import train_step as train_step
    from gshard.nn.strategy import Strategy as Strategy
    from gshard.nn.transformer import ModelMetrics as ModelMetrics
    from gshard.nn.transformer import ModelRoutings as ModelRoutings
    from gshard.nn.transformer import Transformer as Transformer

__all__ = _lazy.attach(
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
