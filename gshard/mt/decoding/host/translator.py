"""A translator on a CPU that compiles nothing: batches of any shape, at once.

`HostModel` is the Transformer of `gshard.nn` for decoding, with equal logits. Flat beam search is
that of `gshard.mt.decoding.search`, with steps outside of XLA: sentences that are done leave the
batch, and a step reads just the slots that are written.

Dims: B sentences, L source tokens (or K * T slots), K beam, T steps, R rows, M model dim, V
vocabulary, C candidates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gshard.mt.batching.tokenizer import END, PAD, START, Tokenizer
from gshard.mt.broadcast import Broadcast
from gshard.mt.decoding import search as flat
from gshard.mt.decoding.host.layers import HIDDEN, Cache, HostLayer, side_by_side
from gshard.mt.decoding.host.products import OnnxGraph, OnnxOutput, Session, Weight
from gshard.mt.decoding.texts import Choices, Routings, SearchJob, TextTranslator, TranslateConfig
from gshard.mt.training.weights import has_experts, in_layer
from gshard.nn.config import TransformerConfig

Load = Callable[[str], Weight]  # a weight by its name in the model


@dataclass
class Decoding:
    """What decoding carries from step to step: for each layer its own cache, and the source's."""

    own: list[Cache]
    source: list[Cache]
    source_hidden: np.ndarray  # [B, 1, 1, L]

    def keep(self, rows: np.ndarray) -> None:
        """Only these sentences."""
        for cache in (*self.own, *self.source):
            cache.keep(rows)
        self.source_hidden = self.source_hidden[rows]


class HostModel:
    """The weights of a model, arranged for products on a CPU; `load` gives each by its name."""

    def __init__(self, config: TransformerConfig, load: Load, weights: int = 0):
        self.config = c = config
        self.weights = weights  # how many there are
        self._source, self._target = (_HostEmbedding(load(f"{s}.table"), c) for s in SIDES)
        self._encoder = list(_layers(load, c, "encoder", c.encoder_layers))
        self._decoder = list(_layers(load, c, "decoder", c.decoder_layers))
        self._memory = _memory(load, c)
        self._outputs: dict[int, Session] = {}
        self._logits = (load("decoder_norm.scale"), load("decoder_norm.bias"), load("target.table"))

    def start(self, source_BL: np.ndarray) -> Decoding:
        """Read sentences, none of them empty."""
        c = self.config
        B, L = source_BL.shape
        real_BL = source_BL != PAD
        hidden_B11L = np.where(real_BL, np.float32(0), HIDDEN)[:, None, None]
        # Products and experts get real tokens only; attention has a place for each.
        real_X = np.flatnonzero(real_BL)
        x_XM = self._source(source_BL.reshape(-1)[real_X], real_X % L)

        def spread(x_XY: np.ndarray) -> np.ndarray:
            all_RY = np.zeros((B * L, x_XY.shape[1]), np.float32)
            all_RY[real_X] = x_XY
            return all_RY

        def cached(*keys_and_values: np.ndarray) -> Cache:
            cache = Cache.empty(B, c, L)
            cache.write(*(spread(each).reshape(B, L, -1) for each in keys_and_values))
            return cache

        for layer in self._encoder:
            q, k, v = layer.own(x_XM)
            cache = cached(k, v)
            x_XM = layer.finish(x_XM, spread(q), cache.keys, cache.values, hidden_B11L, real_X)
        joint = self._memory(x_XM)
        source = [cached(*both) for both in zip(joint[::2], joint[1::2], strict=True)]
        own = [Cache.empty(B, c) for _ in range(c.decoder_layers)]
        return Decoding(own, source, hidden_B11L)

    def step(
        self, state: Decoding, tokens_BK: np.ndarray, position: int, hidden_BKL: np.ndarray, C: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Append the tokens to the caches, and give the C best that may follow each.

        Returned are their log-probabilities, the tokens, and the log-probability of an end [B, K].
        `hidden_BKL` is 0 or `HIDDEN` for each position of the cache, the new ones included.
        """
        B, K = tokens_BK.shape
        x_RM = self._decode(state, tokens_BK, np.full(B * K, position), hidden_BKL)
        scores, tokens, end = self._output(C)(x_RM)
        return scores.reshape(B, K, C), tokens.reshape(B, K, C), end.reshape(B, K)

    def routings(self, source_L: np.ndarray, output_T: np.ndarray, start: int = START) -> Routings:
        """The experts of every token of a sentence and of its translation, read once more.

        Each position of the target reads the token before it, as while decoding.
        """
        T = len(output_T)
        inputs_1T = np.concatenate([[start], output_T[:-1]])[None]
        hidden_1TT = np.where(np.tri(T, dtype=bool), np.float32(0), HIDDEN)[None]
        with self.recording() as (encoder, decoder):
            state = self.start(source_L[None])
            self._decode(state, inputs_1T, np.arange(T), hidden_1TT)
        return Routings(encoder, decoder)

    @contextlib.contextmanager
    def recording(self) -> Iterator[tuple[list[Choices], list[Choices]]]:
        """The choices of the MoE layers of both stacks while this is open."""
        found: tuple[list[Choices], list[Choices]] = ([], [])
        for stack, into in zip((self._encoder, self._decoder), found, strict=True):
            for layer in stack:
                layer.record(into.append)
        try:
            yield found
        finally:
            for layer in (*self._encoder, *self._decoder):
                layer.record(None)

    def _decode(
        self,
        state: Decoding,
        tokens_BK: np.ndarray,
        positions_R: np.ndarray,
        hidden_BKL: np.ndarray,
    ) -> np.ndarray:
        """The decoder's last rows."""
        B, K = tokens_BK.shape
        x_RM = self._target(tokens_BK.reshape(-1), positions_R)
        hidden_B1KL: np.ndarray | None = None
        for layer, own, source in zip(self._decoder, state.own, state.source, strict=True):
            q, k, v = layer.own(x_RM)
            own.write(k.reshape(B, K, -1), v.reshape(B, K, -1))
            if hidden_B1KL is None:  # equal in all layers, whose caches grow alike
                hidden_B1KL = own.hidden(hidden_BKL)
            seen = (own.keys, own.values, hidden_B1KL)
            x_RM = layer.finish(x_RM, q, *seen, source.keys, source.values, state.source_hidden)
        return x_RM

    def _output(self, C: int) -> Session:
        """From the last rows to the C best tokens: logits never leave the graph."""
        if C not in self._outputs:
            scale, bias, table = self._logits
            graph = OnnxGraph()
            x = graph.norm(graph.input("x"), scale, bias)
            scores = graph.add("LogSoftmax", graph.product(x, table.T), axis=-1)
            count = graph.constant(np.array([C]))
            best, tokens = graph.add("TopK", scores, count, outputs=2)
            end = graph.add("Gather", scores, graph.constant(np.array([END])), axis=1)
            self._outputs[C] = graph.compile(best, OnnxOutput(tokens, "int64"), end)
        return self._outputs[C]


SIDES = ("source", "target")


class _HostEmbedding:
    """The vectors of tokens, with their positions."""

    def __init__(self, table: Weight, c: TransformerConfig):
        self._table, self._dim, self._first = table, c.model_dim, c.first_position
        self._scale = np.float32(c.model_dim**0.5)
        self._positions = np.zeros((0, c.model_dim), np.float32)

    def __call__(self, tokens_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
        positions_R = positions_R + self._first
        if positions_R.max(initial=0) >= len(self._positions):
            self._positions = sinusoids(2 * int(positions_R.max()) + 64, self._dim)
        x_RM = self._table[tokens_R].astype(np.float32)
        return x_RM * self._scale + self._positions[positions_R]


def sinusoids(count: int, dim: int) -> np.ndarray:
    """The table of `gshard.nn.layers.sinusoids`."""
    half = dim // 2
    rates_H = 10000.0 ** (-np.arange(half) / max(half - 1, 1))
    angles = np.arange(count, dtype=np.float32)[:, None] * rates_H.astype(np.float32)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _layers(load: Load, c: TransformerConfig, side: str, count: int) -> Iterator[HostLayer]:
    for n in range(count):
        sparse = has_experts(c, side, n)
        yield HostLayer(in_layer(load, c, side, n), c, decoder=side == "decoder", sparse=sparse)


def _memory(load: Load, c: TransformerConfig) -> Session:
    """From the encoder's last rows to the keys and values of every decoder layer."""
    graph = OnnxGraph()
    x = graph.norm(graph.input("x"), load("encoder_norm.scale"), load("encoder_norm.bias"))
    outputs = []
    for n in range(c.decoder_layers):
        weights = in_layer(load, c, "decoder", n)
        both = (side_by_side(weights, c, "cross", (name,)) for name in ("wk", "wv"))
        outputs += [graph.product(x, *given) for given in both]
    return graph.compile(*outputs)


class HostTranslator(TextTranslator):
    """A model whose weights are arranged for products on a CPU."""

    def __init__(
        self,
        model: HostModel,
        tokenizer: Tokenizer,
        config: TranslateConfig = TranslateConfig(),  # noqa: B008  (frozen)
        broadcast: Broadcast | None = None,
    ):
        super().__init__(tokenizer, config, model.config, model.weights, broadcast)
        self._model = model

    def search(self, source: np.ndarray, forced: np.ndarray | None = None) -> flat.Translations:
        """The n-best lists of a batch of tokens, padded at the end.

        What a translation may have at most is that of its own source's shape.
        """
        tokens = (source != PAD).sum(axis=1).tolist()
        each = [self.beam(self.config.shape(count)) for count in tokens]
        longest = max(each, key=lambda config: config.max_length)
        most = np.array([config.max_length for config in each])
        return host_search(self._model, source, longest, most, forced)

    def _batches(self, jobs: Sequence[SearchJob]) -> Iterator[list[SearchJob]]:
        """Batches of any shapes: nothing is compiled for one, and fewer batches are faster."""
        ordered = sorted(jobs, key=lambda job: len(job.ids))
        for i in range(0, len(ordered), self.config.rows):
            yield ordered[i : i + self.config.rows]

    def routings(self, source: Sequence[int], output: Sequence[int]) -> Routings:
        """The experts of every token of a sentence and of its translation."""
        return self._model.routings(np.array(source), np.array(output), self.tokenizer.start)

    def to_compile(self) -> list[Callable[[], Any]]:
        """One short search, which prepares the output's product."""
        return [lambda: self.search(np.array([[END]], np.int32))]


_LEAVE = 0.75  # the batch is made smaller when at most this share of it is left


def host_search(
    model: HostModel,
    source_BL: np.ndarray,
    config: flat.BeamConfig,
    max_length_B: np.ndarray | None = None,
    forced: np.ndarray | None = None,
) -> flat.Translations:
    """Translate sentences of any number and length, each padded with PAD at the end.

    `max_length_B` has the largest length of each translation, where they differ; that of `config`
    is then the largest of all. Every translation begins with the token `forced`, if it is given.
    """
    K, V = config.beam, model.config.target_vocab
    silent_V = np.isin(np.arange(V), [*config.banned, END])
    first_K1, C = V * np.arange(K)[:, None], min(V, K + len(config.banned) + 1)

    def step(
        t: int, live: flat.Live, decoding: Decoding, _: np.ndarray
    ) -> tuple[flat.Continuations, Decoding]:
        hidden_BKL = np.where(live.ancestry[:, :, : (t + 1) * K], np.float32(0), HIDDEN)
        scores_BKC, tokens_BKC, end_BK = model.step(decoding, live.tokens, t, hidden_BKL, C)
        scores_BKC = np.where(silent_V[tokens_BKC], -np.inf, live.scores[:, :, None] + scores_BKC)
        scores_BX, places_BX = (x.reshape(-1, K * C) for x in (scores_BKC, first_K1 + tokens_BKC))
        return flat.Continuations(scores_BX, places_BX, live.scores + end_BK, V), decoding

    search = flat.FlatSearch(config, NUMPY, step, forced)
    real_B = (source_BL != PAD).any(axis=1)
    most_B = np.full(len(real_B), config.max_length) if max_length_B is None else max_length_B
    beams, rows = search.start(real_B, most_B), np.flatnonzero(real_B)
    found = search.found(flat.SearchState(np.zeros((), np.int32), beams, None))  # nothing yet
    if not len(rows):
        return found
    source_BL = source_BL[rows, : int((source_BL != PAD).sum(axis=1).max())]
    state = flat.SearchState(0, _of(rows, beams), model.start(source_BL))
    while len(rows):
        state = search.advance(state)
        left = np.flatnonzero(~state.beams.done)
        if len(left) <= _LEAVE * len(rows):
            done = np.flatnonzero(state.beams.done)
            leaving = search.found(state._replace(beams=_of(done, state.beams)))
            for each, new in zip(found[:3], leaving, strict=False):
                each[rows[done]] = new
            rows, state = rows[left], state._replace(beams=_of(left, state.beams))
            state.cache.keep(left)
    return found._replace(steps=np.asarray(state.step, np.int32))


def _top_k(x_BX: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest entries of each row and where they are, as `jax.lax.top_k` finds them."""
    best_BK = np.argsort(-x_BX, axis=1, kind="stable")[:, :count]
    return _take(x_BX, best_BK), best_BK


def _take(x_BX: np.ndarray, index_BK: np.ndarray) -> np.ndarray:
    """Entries of dim 1; `np.take_along_axis` would copy masks bit by bit."""
    return x_BX[np.arange(len(x_BX))[:, None], index_BK]


NUMPY = flat.Library(np, _top_k, _take)


def _of(rows: np.ndarray, beams: Any) -> Any:
    """Only these sentences."""
    if isinstance(beams, np.ndarray):
        return beams[rows]
    return type(beams)(*(_of(rows, each) for each in beams))
