"""The endless stream of examples: all tasks mixed at a temperature, each shuffled again and again.

Random access throughout: the example at position i is found without iterating to it, which makes a
batch a function of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from gshard.mt.batching.tokenizer import temperature_shares
from gshard.mt.batching.tokens import TaskTokens
from gshard.mt.errors import UserError

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


def sub_seed(seed: int, i: int) -> int:
    """The i-th of the independent seeds that come of one."""
    return int(np.random.SeedSequence([seed, i]).generate_state(1)[0])


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
    shares = temperature_shares([int(fit.sum()) for fit in fits], temperature)
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
