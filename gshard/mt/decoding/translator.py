"""Translation of any number of texts of any length, in few compiled programs.

Texts are cut to what the model can take, sorted by length into batches of a few fixed shapes, and
searched by `beam_search` under `gshard.jit`, spread over the devices as in training. Each shape is
compiled when first needed and kept; the weights go to the devices once. What a text becomes does
not depend on the texts beside it. Where the devices belong to several processes, the first one cuts
and sorts, and the others search the same batches with it. Dims: B sentences, L source tokens, T
tokens of a translation.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

import gshard
from gshard.mt.batching.tokenizer import PAD, Tokenizer
from gshard.mt.broadcast import Broadcast
from gshard.mt.decoding import search as flat
from gshard.mt.decoding.on_device import beam_search
from gshard.mt.decoding.pool import Pool
from gshard.mt.decoding.texts import Choices, Routings, TextTranslator, TranslateConfig
from gshard.mt.training.weights import count_of
from gshard.nn.config import Batch
from gshard.nn.gating import Routing
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import ModelRoutings, Transformer


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

    @functools.cached_property
    def pool(self) -> Pool | None:
        """On one accelerator; on a CPU, rows that nobody has would cost as much as others."""
        if len(self._devices) > 1 or self._told_to_all or self._devices[0].platform == "cpu":
            return None
        return self.new_pool()

    def new_pool(self) -> Pool:
        """A pool with as many rows as a full batch."""
        longest, forces = self.config.longest, self.tokenizer.needs_source
        search, device = self.beam(longest), self._devices[0]
        found = Pool(self._model, search, self.full_rows, longest, device, forces=forces)
        self._model = found.model
        return found

    def to_compile(self) -> list[Callable[[], Any]]:
        """What compiles the programs that a server needs first; for short sentences first."""
        lengths, pool = self.config.lengths, self.pool
        found = [] if pool is None else pool.to_compile(lengths)
        sizes = sorted({self.strategy.devices, self.full_rows}) if pool is None else ()
        for length in lengths:
            found += [functools.partial(self.search_program, rows, length) for rows in sizes]
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
