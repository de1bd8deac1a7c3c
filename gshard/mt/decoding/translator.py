"""Translation of any number of texts of any length, in few compiled programs.

Texts are cut to what the model can take, sorted by length into batches of a few fixed shapes, and
searched by `beam_search` under `gshard.jit`, spread over the devices as in training. Each shape is
compiled when first needed and kept; the weights go to the devices once. What a text becomes does
not depend on the texts beside it. Where the devices belong to several processes, the first one cuts
and sorts, and the others search the same batches with it.

`beam_search` is `gshard.mt.decoding.search` in a loop on the device, one program of XLA. Dims: B
sentences, K beam, T steps, L = K * T slots (or source tokens), V vocabulary, S spans of it, C
tokens of a span, X candidates.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import gshard
from gshard.mt.batching.tokenizer import END, PAD, Tokenizer
from gshard.mt.broadcast import Broadcast
from gshard.mt.decoding import search as flat
from gshard.mt.decoding.texts import Choices, Routings, TextTranslator, TranslateConfig
from gshard.mt.training.weights import count_of
from gshard.nn.config import Batch
from gshard.nn.gating import Routing
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Caches, ModelRoutings, Transformer

_SPAN = 128  # tokens among which one may be the best


def beam_search(
    model: Transformer,
    source_BL: Array,
    config: flat.BeamConfig,
    strategy: Strategy = ONE_DEVICE,
    forced: Array | None = None,
) -> flat.Translations:
    """Translate sentences of any number and length, each padded with PAD at the end.

    To be called under `jax.jit`, or under `gshard.jit` with the strategy of training: the batch is
    split over the devices, and nothing but the experts' tokens and the test for the end crosses
    between them. A sentence that is all padding costs no steps. Every token gets its experts, so
    that a translation does not depend on the batch and the padding around it. Every translation
    begins with the token `forced`, if it is given.
    """
    source_BL = strategy.groups(source_BL)
    real_BL = source_BL != PAD
    positions_BL = jnp.broadcast_to(jnp.arange(source_BL.shape[1]), source_BL.shape)
    memory_BLM, _ = model.encode(
        source_BL, real_BL.astype(jnp.int32), positions_BL, None, strategy, dropless=True
    )
    B, K, T = len(source_BL), config.beam, config.max_length

    def step(t: Array, live: flat.Live, cache: Caches) -> tuple[flat.Continuations, Caches]:
        logits_BKV, cache = model.decode_step(
            live.tokens,
            jnp.broadcast_to(t, live.tokens.shape),
            cache,
            t * K,
            live.ancestry,
            real_BL,
            strategy,
        )
        return continuations(live, logits_BKV, config), cache

    search = flat.FlatSearch(config, JAX, step, forced)
    beams = search.start(jnp.any(real_BL, axis=1), jnp.full(B, T, jnp.int32))
    beams = jax.tree.map(strategy.groups, beams)
    first = flat.SearchState(
        jnp.asarray(0, jnp.int32), beams, model.start_decoding(memory_BLM, K * T)
    )
    final = jax.lax.while_loop(lambda s: ~jnp.all(s.beams.done), search.advance, first)
    return search.found(final)


def continuations(
    live: flat.Live, logits_BKV: Array, config: flat.BeamConfig
) -> flat.Continuations:
    """The tokens of the K spans of the vocabulary in which the K best continuations are.

    The vocabulary is read once to find the spans whose own best are the best: instead of all
    scores only theirs are computed and sorted. Spans are sorted by their place, so that the first
    of equal scores is taken, as if all had been sorted.
    """
    logits_BKV = logits_BKV.astype(jnp.float32)
    B, K, V = logits_BKV.shape
    C = _SPAN if V % _SPAN == 0 else 1
    S = V // C
    spans_BKSC = logits_BKV.reshape(B, K, S, C)
    most_BKS = jnp.max(spans_BKSC, axis=3)
    top_BK1 = jnp.max(most_BKS, axis=2, keepdims=True)
    log_z_BK1 = jnp.log(jnp.sum(jnp.exp(logits_BKV - top_BK1), axis=2, keepdims=True))
    known = live.scores[:, :, None], top_BK1, log_z_BK1
    ends_BK = _scores(logits_BKV[:, :, END : END + 1], *known)[:, :, 0]
    silent = np.array([*config.banned, END])
    allowed_SC = jnp.ones((S, C), bool).at[silent // C, silent % C].set(False)
    for s in sorted({token // C for token in silent.tolist()}):
        spoken_BKC = jnp.where(allowed_SC[s], spans_BKSC[:, :, s], -jnp.inf)
        most_BKS = most_BKS.at[:, :, s].set(jnp.max(spoken_BKC, axis=2))
    _, chosen_BK = jax.lax.top_k(_scores(most_BKS, *known).reshape(B, K * S), K)
    chosen_BK = jnp.sort(chosen_BK, axis=1)
    found_BKC = _take(spans_BKSC.reshape(B, K * S, C), chosen_BK)
    theirs = (_take(x, chosen_BK // S) for x in known)
    scores_BKC = jnp.where(allowed_SC[chosen_BK % S], _scores(found_BKC, *theirs), -jnp.inf)
    places_BKC = chosen_BK[:, :, None] * C + jnp.arange(C)
    return flat.Continuations(scores_BKC.reshape(B, -1), places_BKC.reshape(B, -1), ends_BK, V)


def _scores(logits: Array, before: Array, top: Array, log_z: Array) -> Array:
    """What hypotheses are worth with another token, as `jax.nn.log_softmax` has it."""
    return before + (logits - top - log_z)


def _take(x_BX: Array, index_BK: Array) -> Array:
    """Entries of dim 1, by an index of each sentence's own: no device needs another's."""
    index = index_BK.reshape(*index_BK.shape, *(1,) * (x_BX.ndim - 2))
    return jnp.take_along_axis(x_BX, index, axis=1)


JAX = flat.Library(jnp, jax.lax.top_k, _take)


class Translator(TextTranslator):
    """A model ready to translate; the first batch of each shape waits for its compilation.

    Translators that are given one dict of `programs` compile each program once for all of them,
    as far as their models are of the same shape. `name` is what other processes know it by, to
    whom `broadcast` sends messages. One thread may compile programs while another translates.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        strategy: Strategy = ONE_DEVICE,
        config: TranslateConfig = TranslateConfig(),  # noqa: B008  (frozen)
        programs: dict[Any, Any] | None = None,
        devices: Sequence[jax.Device] | None = None,
        broadcast: Broadcast | None = None,
        name: str = "",
    ):
        super().__init__(tokenizer, config, model.config, count_of(model), broadcast, name)
        self.strategy = strategy
        self._model = model
        self._devices = list((devices or jax.devices())[: strategy.devices])
        # One process writes down what all have found.
        self._told_to_all = len({device.process_index for device in self._devices}) > 1
        self._programs: dict[Any, Any] = {} if programs is None else programs
        self._with_weights: dict[Any, Callable[..., Any]] = {}
        self._in_work: dict[Any, threading.Lock] = {}  # programs, by the same keys
        self._placing = threading.Lock()

    def compiled(
        self, name: str, fn: Callable[..., Any], *shapes: tuple[int, ...]
    ) -> Callable[..., Any]:
        """`fn(model, *arrays)` for arrays of tokens: compiled once, with the weights in place."""
        with self._in_work.setdefault((name, shapes), threading.Lock()):
            if (name, shapes) not in self._with_weights:
                arrays = [np.zeros(shape, np.int32) for shape in shapes]
                key = (self.model_config, self.strategy, self.config, name, shapes)
                if key not in self._programs:
                    jitted = gshard.jit(fn, devices=self._devices)
                    with self._broadcast.compiling():
                        self._programs[key] = jitted.lower(self._model, *arrays).compile()
                program = self._programs[key]
                # Where programs agree on the place of a weight, they share it: nothing is copied.
                with self._placing:
                    self._model, *_ = program.place(self._model, *arrays)
                    self._with_weights[name, shapes] = functools.partial(program, self._model)
        return self._with_weights[name, shapes]

    def search_program(self, rows: int, length: int) -> Callable[..., flat.Translations]:
        """Beam search of `rows` sentences of `length` tokens."""
        return self.compiled("search", self._search_of(length), *self._shapes(rows, length))

    def _shapes(self, rows: int, length: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a search's arguments: a batch, and a forced token if the model needs it."""
        return ((rows, length), ()) if self.tokenizer.needs_source else ((rows, length),)

    def routings(self, source: Sequence[int], output: Sequence[int]) -> Routings:
        """The experts of every token of a sentence and of its translation, as the search ran them.

        The model reads the pair once more with nothing dropped, which gives every token the
        experts that it had while decoding.
        """
        given, wanted = self._pair(self.config.shape(len(source)))
        given[0, : len(source)] = source
        wanted[0, : len(output)] = output
        found = self.routes_program(given.shape[1])(given, wanted)
        return Routings(_choices(found.encoder, len(source)), _choices(found.decoder, len(output)))

    def routes_program(self, length: int) -> Callable[..., ModelRoutings]:
        """The routings of sentences of `length` source tokens and their translations."""
        strategy = self.strategy

        def routings(model: Transformer, source_BL: Array, output_BT: Array) -> ModelRoutings:
            batch = Batch.of(source_BL, output_BT, pad=PAD, start=self.tokenizer.start)
            return model.routings(jax.tree.map(strategy.groups, batch), strategy)

        return self.compiled("routes", routings, *(a.shape for a in self._pair(length)))

    def _pair(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Room for one pair, with a row for each device."""
        most, rows = self.config.search(length).max_length, self.strategy.devices
        return np.full((rows, length), PAD, np.int32), np.full((rows, most), PAD, np.int32)

    def to_compile(self) -> list[Callable[[], Any]]:
        """What compiles the programs that a server needs first; for short sentences first."""
        found: list[Callable[[], Any]] = []
        for length in self.config.lengths:
            for rows in sorted({self.strategy.devices, self.full_rows}):
                found.append(functools.partial(self.search_program, rows, length))
            found.append(functools.partial(self.routes_program, length))
        return found

    def lower_search(self, rows: int, length: int) -> Any:
        """The same program, for a model that may be shapes alone: to be compiled for a cache."""
        jitted = gshard.jit(self._search_of(length), devices=self._devices)
        arrays = (np.zeros(shape, np.int32) for shape in self._shapes(rows, length))
        return jitted.lower(self._model, *arrays)

    def _search_of(self, length: int) -> Callable[..., flat.Translations]:
        config, strategy = self.beam(length), self.strategy

        def search(
            model: Transformer, source_BL: Array, forced: Array | None = None
        ) -> flat.Translations:
            found = beam_search(model, source_BL, config, strategy, forced)
            return jax.tree.map(strategy.replicated, found) if self._told_to_all else found

        return search

    def search(self, source: np.ndarray, forced: np.ndarray | None = None) -> flat.Translations:
        """The n-best lists of a batch of tokens, on the host; all processes have to call this."""
        arrays = (source,) if forced is None else (source, forced)
        return jax.tree.map(np.asarray, self.search_program(*source.shape)(*arrays))

    def _rows(self, count: int, length: int) -> int:
        """The rows of the batch for so many sentences: those of the smallest program that is there.

        One sentence, typed by a person, should not pay for a whole batch; but what is left of a
        long list waits for no compilation. What would have fitted better is remembered.
        """
        small, full = self.strategy.devices, self.full_rows
        fitting = [rows for rows in self.row_counts if rows >= count]
        there = [r for r in fitting if ("search", self._shapes(r, length)) in self._with_weights]
        chosen = there[0] if there else small if count <= small else full
        if chosen != fitting[0]:
            self.missed.add((fitting[0], length))
        return chosen

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The rows that a program may have: one for each device, doubled up to a full batch."""
        full = self.full_rows
        doubled = (self.strategy.devices << n for n in range(full.bit_length()))
        return (*(rows for rows in doubled if rows < full), full)

    @property
    def full_rows(self) -> int:
        """Sentences in a full batch: a whole number for each device."""
        devices = self.strategy.devices
        return -(-self.config.rows // devices) * devices


def _choices(routing: Routing | None, tokens: int) -> list[Choices]:
    """The choices of the first sentence's tokens, layer by layer."""
    if routing is None:
        return []
    both = (np.asarray(a)[:, :, 0, :tokens] for a in (routing.expert, routing.weight))
    return [Choices(expert, weight) for expert, weight in zip(*both, strict=True)]
