"""The Mixture-of-Experts Transformer of the paper's sections 2 and 3.1."""

from gshard.nn.attention import Attention, KeysValues, segment_mask
from gshard.nn.config import Batch, TransformerConfig
from gshard.nn.experts import Experts, MoE
from gshard.nn.family import FAMILY, Model
from gshard.nn.gating import GatingConfig, Routed, RouterMetrics, Routing, route
from gshard.nn.layers import Embedding, FeedForward, LayerNorm
from gshard.nn.optimizer import adafactor, adam, inverse_sqrt, per_matrix
from gshard.nn.pair import PairCache
from gshard.nn.remat import StepMemory, choose_remat, step_memory
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
    "StepMemory",
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
    "step_memory",
    "train_step",
]
