"""XLA's compilers, as far as they differ in what they fuse and store."""

from gshard.forecast.compilers.base import Compiler, Dataflow, Order, Places, fused
from gshard.forecast.compilers.cpu import CPU
from gshard.forecast.compilers.gpu import GPU
from gshard.forecast.compilers.tpu import TPU

COMPILERS: dict[str, Compiler] = {"cpu": CPU(), "gpu": GPU(), "tpu": TPU()}

__all__ = ["COMPILERS", "Compiler", "Dataflow", "Order", "Places", "fused"]
