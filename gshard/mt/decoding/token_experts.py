"""Which experts each token of a translation used, for people to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from gshard.mt.batching.tokenizer import PAD, START
from gshard.mt.decoding.translator import Hypothesis, Translator
from gshard.nn.config import Batch
from gshard.nn.gating import Routing
from gshard.nn.transformer import ModelRoutings, Transformer


@dataclass(frozen=True)
class Route:
    """One token: its piece, and for each MoE layer its (expert, weight), the first choice first."""

    piece: str
    layers: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Routes:
    """The tokens of both sides. A token of the output has the experts that produced it."""

    source: tuple[Route, ...]
    output: tuple[Route, ...]


def routes(translator: Translator, piece: str, best: Hypothesis, target: str = "en") -> Routes:
    """The experts of a piece of text and of its translation, as the search ran them.

    The model reads the pair once more with nothing dropped, which gives every token the experts
    that it had while decoding.
    """
    tokenizer = translator.tokenizer
    (ids,) = tokenizer.encode_source([piece], target)
    ids = ids[: translator.config.longest]
    source, output = _arrays(translator, translator.config.shape(len(ids)))
    tokens = best.tokens[: output.shape[1]]
    source[0, : len(ids)] = ids
    output[0, : len(tokens)] = tokens
    found = routes_program(translator, source.shape[1])(source, output)
    return Routes(
        _routes(tokenizer.spell_source(ids), found.encoder),
        _routes(tokenizer.spell_target(tokens), found.decoder),
    )


def routes_program(translator: Translator, length: int) -> Callable[..., ModelRoutings]:
    """The routings of sentences of `length` source tokens and their translations."""
    strategy = translator.strategy

    def routings(model: Transformer, source_BL: Array, output_BT: Array) -> ModelRoutings:
        batch = Batch.of(source_BL, output_BT, pad=PAD, start=START)
        return model.routings(jax.tree.map(strategy.groups, batch), strategy)

    return translator.compiled("routes", routings, *(a.shape for a in _arrays(translator, length)))


def _arrays(translator: Translator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Room for one pair, with a row for each device."""
    most = translator.config.search(length).max_length
    rows = translator.strategy.devices
    return np.full((rows, length), PAD, np.int32), np.full((rows, most), PAD, np.int32)


def _routes(pieces: Sequence[str], routing: Routing | None) -> tuple[Route, ...]:
    if routing is None:
        return tuple(Route(piece, ()) for piece in pieces)
    expert_NKT, weight_NKT = (np.asarray(a)[:, :, 0] for a in (routing.expert, routing.weight))

    def layers(t: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        both: Any = zip(expert_NKT[:, :, t].tolist(), weight_NKT[:, :, t].tolist(), strict=True)
        return tuple(tuple(zip(experts, weights, strict=True)) for experts, weights in both)

    return tuple(Route(piece, layers(t)) for t, piece in enumerate(pieces))
