"""Continuous batching: sentences join and leave one search on a device, between its steps.

A batch takes as long as its longest translation, and who comes meanwhile waits. In a pool a
sentence that is done leaves at once, and the next one has its row: the device holds the state of
the search, and the host is asked every few steps which rows are done and who waits. Few sentences
are searched in few rows, and rows move when more come. What a sentence becomes does not depend on
when it joins, or beside whom. Dims are those of the translator's; R rows that change at a time.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import gshard
from gshard.mt.batching.tokenizer import PAD
from gshard.mt.decoding.on_device import flat_search
from gshard.mt.decoding.search import BeamConfig, FlatSearch, SearchState, Translations
from gshard.nn.transformer import Transformer

STEPS = 8  # of the search, before the host looks who waits
_FEWER = (8, 64)  # rows where few sentences are searched
_CHANGED = 32  # rows that join at a time, at most
_SHARE = 8  # the search pauses as soon as this part of its sentences is done


class Pooled(NamedTuple):
    """The state of a pool on the device."""

    search: SearchState
    real: Array  # [B, L], which source tokens there are
    forced: Array  # [B], the first token of a translation, if the model needs it


class Joining(NamedTuple):
    """Sentences that join: their rows, past the end for none, and what is searched."""

    row: Any  # [R]
    source: Any  # [R, L]
    most: Any  # [R], the largest length of a translation
    forced: Any  # [R]


class Waiting(NamedTuple):
    """A sentence, as it was added."""

    key: Hashable
    ids: Sequence[int]
    length: int
    most: int
    forced: int


class Pool:
    """Up to `rows` sentences that are searched at once; for one thread.

    `config` has the largest length of any translation, and sources have up to `longest` tokens.
    """

    def __init__(
        self,
        model: Transformer,
        config: BeamConfig,
        rows: int,
        longest: int,
        device: jax.Device | None = None,
        *,
        forces: bool = False,
    ):
        self._devices = [device or jax.devices()[0]]
        self.model = jax.device_put(model, self._devices[0])
        self._config, self._longest, self._forces = config, longest, forces
        self._sizes = sorted({rows, *(few for few in _FEWER if few < rows)})
        self._changed = min(_CHANGED, rows)
        self._waiting: deque[Waiting] = deque()
        self._held: list[Hashable | None] = []  # whom each row is for
        self._state: Any = None
        self._running: tuple[list[Hashable | None], Any] | None = None  # whom it searches for now
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._in_work: dict[Any, threading.Lock] = {}  # programs, by the same keys

    def add(
        self, key: Hashable, ids: Sequence[int], length: int, most: int, forced: int = PAD
    ) -> None:
        """Have a sentence searched as soon as a row is free, and give it by this key.

        Its tokens `ids` are padded to `length`, and a translation has at most `most`, of which
        `forced` is the first, if the model needs one.
        """
        self._waiting.append(Waiting(key, ids, length, most, forced))

    def __len__(self) -> int:
        """The sentences that are searched or wait."""
        return len(self._waiting) + sum(key is not None for key in self._held)

    def run(self) -> Iterator[tuple[Hashable, Translations]]:
        """Give those that are done, after letting in who waits for their rows.

        The device searches on while the caller has what is given.
        """
        finished: list[tuple[Hashable, Translations]] = []
        running, self._running = self._running, None
        if running is not None:
            keys, results = running
            done, found = jax.device_get(results)
            for n in np.flatnonzero(done):
                if (key := keys[n]) is not None and self._held[n] is key:
                    self._held[n] = None
                    tokens, scores, lengths = (part[n : n + 1] for part in found[:3])
                    finished.append((key, Translations(tokens, scores, lengths, found.steps)))
        if len(self):
            self._resize()
            self._let_in()
            busy = np.array([key is not None for key in self._held])
            enough = np.int32(max(1, busy.sum() // _SHARE))
            advance = self._program("advance", len(busy))
            self._state, *results = advance(self.model, self._state, busy, enough)
            self._running = list(self._held), results
        yield from finished

    def drop(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Give up sentences that nobody waits for any more."""
        self._waiting = deque(s for s in self._waiting if not unwanted(s.key))
        self._held = [None if k is not None and unwanted(k) else k for k in self._held]

    def _resize(self) -> None:
        """Use no more rows than needed; a pool that is empty begins anew."""
        held = [n for n, key in enumerate(self._held) if key is not None]
        size = next((s for s in self._sizes if s >= len(self)), self._sizes[-1])
        if size == len(self._held) and held:
            return
        if held:
            row = np.full(size, len(self._held), np.int32)
            row[: len(held)] = held
            self._state = self._program("move", len(self._held), size)(self.model, self._state, row)
        else:
            self._state = self._program("empty", size)(self.model)
        keys = [self._held[n] for n in held]
        self._held = [*keys, *[None] * (size - len(keys))]

    def _let_in(self) -> None:
        """Give free rows to sentences that have waited longest, one length after the other."""
        free = deque(n for n, key in enumerate(self._held) if key is None)
        while free and self._waiting:
            some = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
            for length in sorted({s.length for s in some}):
                alike = [s for s in some if s.length == length]
                for i in range(0, len(alike), self._changed):
                    self._enter(alike[i : i + self._changed], length, free)

    def _enter(self, some: Sequence[Waiting], length: int, free: deque[int]) -> None:
        new = self._nobody(len(self._held), length)
        for n, sentence in enumerate(some):
            new.row[n] = row = free.popleft()
            new.source[n, : len(sentence.ids)] = sentence.ids
            new.most[n], new.forced[n] = sentence.most, sentence.forced
            self._held[row] = sentence.key
        join = self._program("join", len(self._held), length)
        self._state = join(self.model, self._state, new)

    def _nobody(self, size: int, length: int) -> Joining:
        """Sources of `length` for none of so many rows."""
        R = self._changed
        return Joining(
            np.full(R, size, np.int32),
            np.full((R, length), PAD, np.int32),
            np.ones(R, np.int32),
            np.full(R, PAD, np.int32),
        )

    # ------------------------------------------------------------ programs

    def to_compile(self, lengths: Sequence[int]) -> list[Callable[[], Any]]:
        """What compiles all programs, for sources padded to these lengths: first for few."""
        keys: list[tuple[Any, ...]] = []
        for size in self._sizes:
            keys += [("empty", size), ("advance", size)]
            keys += [("join", size, length) for length in lengths]
        keys += [("move", *pair) for pair in itertools.permutations(self._sizes, 2)]
        return [functools.partial(self._program, *key) for key in keys]

    def _program(self, *key: Any) -> Callable[..., Any]:
        """One of the programs below, for so many rows: compiled once, by any thread."""
        with self._in_work.setdefault(key, threading.Lock()):
            if key not in self._programs:
                name, size, *more = key
                empty = functools.partial(self._empty, size=size)
                state = jax.eval_shape(empty, self.model)
                programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
                    "empty": (empty, ()),
                    "advance": (self._advanced, (state, np.zeros(size, bool), np.int32(1))),
                    "join": (self._joined, (state, *(self._nobody(size, n) for n in more))),
                    "move": (self._moved, (state, *(np.zeros(n, np.int32) for n in more))),
                }
                run, rest = programs[name]
                donated = (1,) if name in ("advance", "join") else ()
                jitted = gshard.jit(run, devices=self._devices, donate_argnums=donated)
                self._programs[key] = jitted.lower(self.model, *rest).compile()
        return self._programs[key]

    # ------------------------------------------------------------ on the device

    def _search(self, model: Transformer, state: Pooled) -> FlatSearch:
        forced = state.forced if self._forces else None
        return flat_search(model, state.real, self._config, forced=forced)

    def _empty(self, model: Transformer, size: int) -> Pooled:
        """The state of rows that nobody has."""
        c, real_BL = model.config, jnp.zeros((size, self._longest), bool)
        forced_B, most_B = jnp.full(size, PAD, jnp.int32), jnp.ones(size, jnp.int32)
        search = flat_search(model, real_BL, self._config)
        beams = search.start(jnp.zeros(size, bool), most_B)
        memory_BLM = jnp.zeros((*real_BL.shape, c.model_dim), c.dtype)
        cache = model.start_decoding(memory_BLM, self._config.beam * self._config.max_length)
        return Pooled(SearchState(jnp.int32(0), beams, cache), real_BL, forced_B)

    def _moved(self, model: Transformer, state: Pooled, row_C: Array) -> Pooled:
        """The rows `row_C` of a state, and empty ones for rows past its end."""
        (step, beams, cache), *others = state
        there_C = row_C < len(beams.done)
        beams, real, forced = jax.tree.map(lambda x: x.at[row_C].get(mode="clip"), (beams, *others))
        beams = beams._replace(done=beams.done | ~there_C)
        return Pooled(SearchState(step, beams, model.cache_rows(cache, row_C)), real, forced)

    def _joined(self, model: Transformer, state: Pooled, new: Joining) -> Pooled:
        """The state with other sentences in some rows."""
        (step, beams, cache), real_BL, forced_B = state
        R, length = new.source.shape
        real_RL = new.source != PAD
        positions_RL = jnp.broadcast_to(jnp.arange(length), new.source.shape)
        memory_RLM, _ = model.encode(
            new.source, real_RL.astype(jnp.int32), positions_RL, dropless=True
        )
        beyond = (0, 0), (0, self._longest - length)
        memory_RLM, real_RL = jnp.pad(memory_RLM, (*beyond, (0, 0))), jnp.pad(real_RL, beyond)
        fresh = self._search(model, state).start(jnp.ones(R, bool), new.most)
        fresh = fresh._replace(born=jnp.full(R, step, jnp.int32))
        # Steps are counted from the oldest sentence, in entire rounds of the places.
        born_B = jnp.where(beams.done, step, beams.born)
        past = jnp.min(born_B) // self._config.max_length * self._config.max_length

        def put(old: Array, one: Array) -> Array:
            return old.at[new.row].set(one.astype(old.dtype), mode="drop")

        beams = jax.tree.map(put, beams, fresh)
        beams = beams._replace(born=beams.born - past)
        cache = model.enter(cache, memory_RLM, new.row)
        real_BL, forced_B = put(real_BL, real_RL), put(forced_B, new.forced)
        return Pooled(SearchState(step - past, beams, cache), real_BL, forced_B)

    def _advanced(
        self, model: Transformer, state: Pooled, busy_B: Array, enough: Array
    ) -> tuple[Pooled, Array, Translations]:
        """Some steps; which rows are done now, and the translations of all."""
        search, first = self._search(model, state), state.search.step

        def goes_on(now: SearchState) -> Array:
            done = jnp.sum(now.beams.done & busy_B)
            left = jnp.any(~now.beams.done & busy_B)
            return (now.step < first + STEPS) & (done < enough) & left

        now: SearchState = jax.lax.while_loop(goes_on, search.advance, state.search)
        return state._replace(search=now), now.beams.done & busy_B, search.found(now)
