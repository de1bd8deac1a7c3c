"""Batches by Grain: a batch is a function of (seed, step), whoever asks for it.

The examples of all tasks are drawn from one endless stream, mixed at a temperature; the stream is
read in blocks of one step or many, and a block is packed into rows. All of that needs only lengths,
so every host and every worker plans alike and then reads only the rows that are its own. Hence the
batches do not depend on the number of hosts or workers, and resuming is naming a step: the example
at any position of the stream is found without iterating to it.
"""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import numpy as np

from gshard.errors import UserError
from gshard.mt.batching.packing import Arrays, fill, pack
from gshard.mt.batching.tokenizer import temperature_shares
from gshard.mt.batching.tokens import TaskTokens
from gshard.mt.launch.status import belong_to_parent
from gshard.nn.config import Count, SettingBounds

SHORT = 4  # examples with fewer English words than this are down-weighted
Draw = tuple[int, int]  # a task's number and an example's
Group = tuple[int, np.ndarray, float]  # a task's number, some of its examples, their weight


def load_grain() -> ModuleType:
    """Grain, which not every machine has: imported when batches are first asked for."""
    try:
        import grain
    except ImportError:
        raise UserError("batches need Grain: pip install 'gshard[mt]'") from None
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's workers read absl's flags, which are not parsed here
    return grain


class Cycle:
    """Which of several parts each position of a mixture takes its next element from.

    A cycle holds every part in proportion to its weight, in a seeded random order. (Grain's own
    mixing walks over all parts for each element, and has hundreds of them here.)
    """

    def __init__(self, weights: Sequence[float], seed: int):
        weights_P = np.asarray(weights, dtype=np.float64)
        cycle = max(1 << 14, 64 * len(weights_P))
        exact_P = weights_P / weights_P.sum() * cycle
        counts_P = np.maximum(1, np.floor(exact_P)).astype(np.int64)
        # Largest remainders make up the cycle, so that shares are kept to one part of it.
        missing = max(0, cycle - int(counts_P.sum()))
        counts_P[np.argsort(-(exact_P - counts_P), kind="stable")[:missing]] += 1
        order = np.repeat(np.arange(len(counts_P)), counts_P)
        self._order = np.random.default_rng([seed, 1]).permutation(order)
        self._counts = counts_P
        # How often a position's part came before it in the cycle.
        places = np.argsort(self._order, kind="stable")
        self._rank = np.empty_like(self._order)
        self._rank[places] = np.concatenate([np.arange(count) for count in counts_P])

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each position, the part it belongs to and which element of that part it is."""
        cycle, place = np.divmod(positions, len(self._order))
        part = self._order[place]
        return part, cycle * self._counts[part] + self._rank[place]


class Stream:
    """Examples of several groups, mixed by weight, each group reshuffled in every epoch."""

    def __init__(self, groups: Sequence[Group], seed: int):
        self._tasks = np.array([task for task, _, _ in groups])
        self._examples = [examples.astype(np.int32) for _, examples, _ in groups]
        self._sizes = np.array([len(examples) for examples in self._examples])
        self._seed = seed
        self._schedule = Cycle([weight for _, _, weight in groups], seed)
        self._shuffled: dict[int, tuple[int, np.ndarray]] = {}  # by group: the round, its order

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_shuffled": {}}

    def take(self, begin: int, end: int) -> list[Draw]:
        """The (task, example) numbers at positions `begin` to `end` of the stream."""
        part_N, key_N = self._schedule.locate(np.arange(begin, end))
        round_N, place_N = np.divmod(key_N, self._sizes[part_N])
        example_N = np.empty_like(key_N)
        turns = np.stack([part_N, round_N])
        for part, turn in np.unique(turns, axis=1).T.tolist():
            mine = (part_N == part) & (round_N == turn)
            example_N[mine] = self._order(part, turn)[place_N[mine]]
        return list(zip(self._tasks[part_N].tolist(), example_N.tolist(), strict=True))

    def _order(self, part: int, turn: int) -> np.ndarray:
        """A group's examples in the order of its `turn`-th round; only the last is remembered."""
        known = self._shuffled.get(part)
        if known is None or known[0] != turn:
            rng = np.random.default_rng([self._seed, 3, part, turn])
            known = (turn, rng.permutation(self._examples[part]))
            self._shuffled[part] = known
        return known[1]


def weighted_groups(
    tokens: Sequence[TaskTokens],
    fits: Sequence[np.ndarray],
    temperature: float,
    short_weight: float,
) -> list[Group]:
    """Long and short examples of every task with the weight each kind gets in the mixture.

    Two of five messages of programs have fewer than four words: at their full weight they would
    teach a model to translate menus.
    """
    # A pair that is cut into pieces several ways counts once.
    counts = [
        -(-int(fit.sum()) // each.target.times) for each, fit in zip(tokens, fits, strict=True)
    ]
    shares = temperature_shares(counts, temperature)
    groups = []
    for task, (examples, fit) in enumerate(zip(tokens, fits, strict=True)):
        short = np.asarray(examples.english_words) < SHORT
        kinds = ((fit & ~short, 1.0), (fit & short, short_weight))
        total = sum(kind.sum() * weight for kind, weight in kinds)
        for kind, weight in kinds:
            if kind.any():
                share = float(shares[task] * kind.sum() * weight / total)
                groups.append((task, np.flatnonzero(kind), share))
    return groups


def fitting(tokens: Sequence[TaskTokens], source: int, target: int) -> list[np.ndarray]:
    """For each task, which of its examples have at most so many tokens on each side."""
    return [
        (np.asarray(examples.source.lengths) <= source)
        & (np.asarray(examples.target.lengths) <= target)
        for examples in tokens
    ]


_ENDLESS = 1 << 40  # steps
_BLOCK = 100_000  # token slots planned at a time: enough to pack well, few enough to be quick
_SURPLUS = 1.03  # rows planned for each row needed, so that hardly any stays empty


@dataclass(frozen=True)
class BatchConfig:
    """What a batch is and how its examples are drawn."""

    rows: int = 32  # of all hosts together
    source_length: int = 64
    target_length: int = 36  # English needs fewer tokens than most languages
    temperature: Annotated[float, SettingBounds(0, math.inf)] = 5.0
    short_weight: float = 0.3  # of a short example, where a long one weighs 1
    seed: Count = 0
    languages: bool = False  # add an array that says which task each source token belongs to

    def __post_init__(self) -> None:
        if min(self.rows, self.source_length, self.target_length) < 1:
            raise UserError(
                "a batch needs at least one row, and a row at least one token of each side"
            )
        if not 0 < self.short_weight <= 1:
            raise UserError(f"short_weight {self.short_weight} is not in (0, 1]")


@dataclass(frozen=True)
class Host:
    """Which part of every batch this process reads."""

    index: int = 0
    count: int = 1

    def part(self, rows: int) -> slice:
        """This host's rows of a batch of `rows`."""
        if rows % self.count:
            raise UserError(f"{rows} rows do not divide among {self.count} hosts")
        size = rows // self.count
        return slice(self.index * size, (self.index + 1) * size)


class Batches:
    """The endless sequence of batches: random access by step, and iteration that reads ahead.

    Threads, or `workers` processes, keep `ahead` of them. To Grain it is a source.
    """

    def __init__(
        self,
        tokens: Sequence[TaskTokens],
        config: BatchConfig,
        host: Host = Host(),
        workers: int = 0,
        ahead: int = 8,
    ):
        self._tokens, self.config, self._host = tokens, config, host
        self._workers, self._ahead = workers, ahead
        host.part(config.rows)
        self.tasks = tuple(examples.task for examples in tokens)
        fits = fitting(tokens, config.source_length, config.target_length)
        self.examples = sum(map(len, fits))
        self.too_long = self.examples - sum(int(fit.sum()) for fit in fits)
        groups = weighted_groups(tokens, fits, config.temperature, config.short_weight)
        self._stream = Stream(groups, config.seed)
        sides = [(examples.source.lengths, examples.target.lengths) for examples in tokens]
        self._lengths = np.concatenate([np.stack(pair, axis=1, dtype=np.int32) for pair in sides])
        self._first = np.cumsum([0, *map(len, tokens)])  # of each task, among all lengths
        self._rooms = (config.source_length, config.target_length)
        self._steps = max(1, _BLOCK // (config.rows * sum(self._rooms)))
        self._lock = threading.Lock()
        self._plans: dict[int, list[list[Draw]]] = {}
        self._window = self._fit_window(groups)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_plans")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _plans={})

    def __len__(self) -> int:
        return _ENDLESS

    def _fit_window(self, groups: Sequence[Group]) -> int:
        """How many draws fill a block's rows and the surplus.

        How full rows become is seen by packing a block. Its draws may be some percent longer or
        shorter than others, so how long they are is taken from all examples.
        """
        wanted = self._steps * self.config.rows
        total = sum(
            weight * self._lengths[self._first[task] + examples].mean(axis=0)
            for task, examples, weight in groups
        )
        mean_share = max(total / sum(weight for _, _, weight in groups) / self._rooms)
        lengths = self._lengths_of(self._stream.take(0, math.ceil(wanted / mean_share)))
        rows = self._pack(lengths)
        full = rows[:-1] or rows  # the last one has what was left
        share = max(lengths[np.concatenate(full)].sum(axis=0) / self._rooms) / len(full)
        return max(1, int(_SURPLUS * wanted * share / mean_share))

    def _lengths_of(self, draws: list[Draw]) -> np.ndarray:
        task_N, example_N = np.array(draws).T
        lengths: np.ndarray = self._lengths[self._first[task_N] + example_N]
        return lengths

    def _pack(self, lengths: np.ndarray) -> list[list[int]]:
        return pack(lengths[:, 0], lengths[:, 1], *self._rooms)

    def _plan(self, block: int) -> list[list[Draw]]:
        """The rows of a block, in random order.

        A few more rows are packed than needed and a random few left out, which leaves every
        example the same chance; taking the first rows would favour the long ones.
        """
        with self._lock:
            if block not in self._plans:
                draws = self._stream.take(block * self._window, (block + 1) * self._window)
                rows = self._pack(self._lengths_of(draws))
                order = np.random.default_rng([self.config.seed, 2, block]).permutation(len(rows))
                wanted = self._steps * self.config.rows
                plan = [[draws[i] for i in rows[row]] for row in order[:wanted]]
                plan += [[] for _ in range(wanted - len(plan))]
                # Only neighbours are asked for again: by the threads that read ahead.
                self._plans = {k: v for k, v in self._plans.items() if abs(k - block) <= 2}
                self._plans[block] = plan
            return self._plans[block]

    def __getitem__(self, step: int) -> Arrays:
        block, inside = divmod(int(step), self._steps)
        rows = self.config.rows
        batch = self._plan(block)[inside * rows : (inside + 1) * rows]
        mine = batch[self._host.part(rows)]
        return fill(mine, self._tokens, *self._rooms, self.config.languages)

    def iterate(self, step: int = 0) -> BatchIterator:
        """The batches from `step` on."""
        return BatchIterator(self._read_ahead, step)

    def _read_ahead(self, step: int) -> Any:
        grain = load_grain()
        steps = grain.MapDataset.source(self)[step:]
        if not self._workers:
            return iter(steps.to_iter_dataset(grain.ReadOptions(2, self._ahead)))
        dataset = steps.to_iter_dataset(grain.ReadOptions(1, 2))
        options = grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=self._ahead)
        return iter(dataset.mp_prefetch(options, worker_init_fn=_begin_worker))

    def __iter__(self) -> BatchIterator:
        return self.iterate()


def _begin_worker(worker: int, count: int) -> None:
    belong_to_parent()


class BatchIterator(Iterator[Arrays]):
    """Batches in order, with the padding counted and a state to save beside a checkpoint."""

    def __init__(self, start: Callable[[int], Any], step: int):
        self._start = start
        self._iterator = start(step)
        self.step = step
        self.slots = self.tokens = 0
        atexit.register(_close, weakref.ref(self))  # workers ignore what Python sends them then

    def __next__(self) -> Arrays:
        # Copies, since a worker's results are in memory that is shared with it.
        batch = {name: np.array(array) for name, array in next(self._iterator).items()}
        self.step += 1
        for name in ("source_segments", "target_segments"):
            self.slots += batch[name].size
            self.tokens += int(np.count_nonzero(batch[name]))
        return batch

    @property
    def padding(self) -> float:
        """The share of token slots so far that hold padding."""
        return 1 - self.tokens / self.slots if self.slots else 0.0

    def get_state(self) -> dict[str, int]:
        """What `set_state` needs to resume with the next batch: the step, and the counts so far."""
        return {"step": self.step, "slots": self.slots, "tokens": self.tokens}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue as the iterator that `state` was taken from would have."""
        self.close()
        self.step = int(state["step"])
        self.slots, self.tokens = int(state.get("slots", 0)), int(state.get("tokens", 0))
        self._iterator = self._start(self.step)

    def close(self) -> None:
        """Stop the workers."""
        close = getattr(self._iterator, "close", None)
        if close:
            close()


def _close(found: weakref.ref[BatchIterator]) -> None:
    iterator = found()
    if iterator is not None:
        iterator.close()
