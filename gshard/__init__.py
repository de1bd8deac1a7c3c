"""gshard: annotate a few tensors, partition the whole program."""

from gshard.annotate import replicate, shard, split

__all__ = ["replicate", "shard", "split"]
