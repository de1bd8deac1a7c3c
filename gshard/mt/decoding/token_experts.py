"""Which experts each token of a translation used, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gshard.mt.decoding.texts import Choices, Hypothesis, TextTranslator


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


def routes(
    translator: TextTranslator, piece: str, best: Hypothesis, target: str = "en", source: str = ""
) -> Routes:
    """The experts of a piece of text and of its translation, as the search ran them."""
    tokenizer, config = translator.tokenizer, translator.config
    (ids,) = tokenizer.encode_source([piece], target, source)
    ids = ids[: config.longest]
    tokens = best.tokens[: config.search(config.shape(len(ids))).max_length]
    found = translator.routings(ids, tokens)
    return Routes(
        _routes(tokenizer.spell_source(ids), found.encoder),
        _routes(tokenizer.spell_target(tokens), found.decoder),
    )


def _routes(pieces: Sequence[str], layers: Sequence[Choices]) -> tuple[Route, ...]:
    def at(t: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        return tuple(
            tuple(zip(each.expert[:, t].tolist(), each.weight[:, t].tolist(), strict=True))
            for each in layers
        )

    return tuple(Route(piece, at(t)) for t, piece in enumerate(pieces))
