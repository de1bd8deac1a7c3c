"""Search, for problems that stay too large to be solved at once.

Prices on memory and messages along the edges (`dual`) give a bound and say which strategies look
good. A part of the strategies of all nodes (a kernel), or all strategies of some nodes (a
neighbourhood), is a smaller problem: it is presolved and solved exactly, around the best answer.

Draws take turns with that; what has gained more gets more time. With prices in place of the limit
the best answer holds too much at some times and too little at others, so the prices of each node
are changed at random, and what the nodes then want is granted in a random order, as far as memory
goes. Each combination of what they are granted fits: the best one is found without regard to
memory, and what stays spare is given out again. A pass finds the best strategies of many nodes at
once: a node of at most two neighbours is eliminated, as a cost between them, and where no such node
is left, one is kept at the strategy that it has, which takes its edges away.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from gshard.autosharding.budget import WORK, Clock
from gshard.autosharding.solver.dual import Prices
from gshard.autosharding.solver.ilp import NOTHING, Result, solve_exactly
from gshard.autosharding.solver.presolve import ProblemGraph, by_node, presolve, profile_of
from gshard.autosharding.solver.problem import Bools, Floats, Ints, NoAnswerError, Problem

# The share of the time that is left that one kernel, neighbourhood or draw may take. (On K of the
# contest, neighbourhoods and draws in turn found an answer that costs 5% less than draws alone.)
_SHARE = 0.06

# Pairs of strategies of the first kernel, and of a neighbourhood: HiGHS proves these in seconds.
_FIRST_PAIRS = 20_000

_LARGEST_TABLE = 1 << 18  # entries that a pass computes to eliminate a node
_ORDERS = 4  # in which memory is granted in a draw
_PASSES = 6  # over the nodes under prices; later ones change next to nothing


def improve(
    tables: Sequence[dict[int, Floats]],
    costs: Sequence[Floats],
    answer: Ints,
    free: Sequence[int],
    allowed: Sequence[Ints],
    random: np.random.Generator,
) -> Ints:
    """An answer that costs no more, in which free nodes take allowed strategies (sorted), as they
    do in the answer given, and the others stay as they are. `tables` are the edges of each node."""
    own: dict[int, Floats] = {}
    edges: dict[int, dict[int, Floats]] = {node: {} for node in free}
    for node in free:
        own[node] = costs[node][allowed[node]]
        for other, table in tables[node].items():
            if other not in edges:
                own[node] = own[node] + table[allowed[node], answer[other]]
            elif node not in edges[other]:
                edges[node][other] = table[np.ix_(allowed[node], allowed[other])]
                edges[other][node] = edges[node][other].T
    ranks = random.random(len(free)) * [-len(edges[node]) for node in free]
    order = iter([free[i] for i in np.argsort(ranks, kind="stable")])
    small = [(len(found), node) for node, found in edges.items() if len(found) <= 2]
    heapq.heapify(small)
    removed: list[tuple[int, Floats, dict[int, Floats]]] = []
    while own:
        chosen = _eliminable(small, own, edges)
        if chosen is None:  # keep one
            node = next(node for node in order if node in own)
            at = int(np.searchsorted(allowed[node], answer[node]))
            del own[node]
            others = edges.pop(node)
            for other in others:
                own[other] = own[other] + edges[other].pop(node)[:, at]
        else:
            node = chosen
            total, others = own.pop(node), edges.pop(node)
            removed.append((node, total, others))
            for other in others:
                del edges[other][node]
            if len(others) == 1:
                ((other, table),) = others.items()
                own[other] = own[other] + (total[:, None] + table).min(axis=0)
            elif len(others) == 2:
                (first, one), (second, two) = others.items()
                both = ((total[:, None] + one)[:, :, None] + two[:, None, :]).min(axis=0)
                both = both + edges[first].get(second, 0.0)
                edges[first][second], edges[second][first] = both, both.T
        for other in others:
            if len(edges[other]) <= 2:
                heapq.heappush(small, (len(edges[other]), other))
    answer = answer.copy()
    for node, total, others in reversed(removed):
        for other, table in others.items():
            total = total + table[:, int(np.searchsorted(allowed[other], answer[other]))]
        answer[node] = allowed[node][int(total.argmin())]
    return answer


def _eliminable(
    small: list[tuple[int, int]], costs: dict[int, Floats], edges: dict[int, dict[int, Floats]]
) -> int | None:
    """A node of at most two neighbours that can be eliminated."""
    while small:
        degree, node = heapq.heappop(small)
        if node in costs and degree == len(edges[node]):
            entries = len(costs[node]) * math.prod(len(costs[other]) for other in edges[node])
            if degree < 2 or entries <= _LARGEST_TABLE:
                return node
    return None


class MemorySlack:
    """What the nodes of a problem hold, and how spare memory is granted to them."""

    def __init__(self, problem: Problem) -> None:
        self.memory = problem.memory
        self.every: list[Ints] = [np.arange(len(costs)) for costs in problem.costs]
        # For each node times, and from each of them on the bytes by strategy.
        self.held: dict[int, tuple[Ints, Floats]] = {}
        self.least = np.zeros(len(problem.costs), dtype=np.int64)  # holds least, over all times
        for node, holdings in enumerate(by_node(problem.memory, len(problem.costs))):
            if holdings:
                times, usage = profile_of(problem.memory, holdings)
                self.held[node] = times, usage[:-1]
                self.least[node] = (np.diff(times) @ usage[:-1]).argmin()

    def granted(self, order: Ints, base: Ints, wanted: Ints | None) -> list[Ints] | None:
        """The strategies that each node of `order` may take, so that any combination of them is
        within the limit while all other nodes stay at `base`; None where `base` exceeds it.

        The nodes get what `base` leaves one after the other, up to what they hold under `wanted`.
        """
        spare, allowed = self.memory.limit - self.memory.profile(base), list(self.every)
        if spare.min(initial=0.0) < 0.0:
            return None
        for node in (node for node in order.tolist() if node in self.held):
            times, usage = self.held[node]
            now, end = usage[:, base[node]], int(times[-1])
            left = np.minimum.reduceat(spare[:end], times[:-1])
            fits = (usage - now[:, None] <= left[:, None]).all(axis=0)
            if wanted is not None:
                modest = fits & (usage <= usage[:, [wanted[node]]]).all(axis=0)
                fits = modest if modest.any() else fits
            allowed[node] = np.flatnonzero(fits)
            more = usage[:, allowed[node]].max(axis=1) - now
            spare[times[0] : end] -= np.repeat(more, np.diff(times))
        return allowed


class Search:
    """The best answer so far, and how it is improved."""

    def __init__(self, problem: Problem, clock: Clock, best: Result = NOTHING) -> None:
        self.problem, self.clock, self.best = problem, clock, best
        self.prices, self.slack = Prices(problem), MemorySlack(problem)
        self.random = np.random.default_rng(0)
        self.failures = 0  # draws that have found nothing, after which prices are higher
        self.gains = [1e-6, 1e-6]  # of draws and of neighbourhoods, as shares a second
        self.tables = problem.tables

    @property
    def left(self) -> float:
        """Seconds that are left; none where the best answer is proven."""
        return self.clock.left if self.best.gap > 1e-9 else 0.0

    def run(self) -> Result:
        """Search until the best answer is proven or time runs out."""
        every = range(len(self.problem.costs))
        self.prices.ascend(self.clock.part(0.2 * self.left), 400)
        for number in range(3):
            if self.left > 0 or (self.best.answer is None and not number):  # one in any case
                self._found(self.draw(every))
        self._solve_kernels()
        size = _FIRST_PAIRS // 5
        while self.left > 0 and self.best.answer is not None:
            share = min(max(self.gains[0] / sum(self.gains), 0.2), 0.8)
            began, before = self.clock.left, self.best.cost
            if drawn := self.random.random() < share:
                self._found(self.draw(self._region()))
            else:
                size = self._improve_neighbourhood(size)
            gained = (before - self.best.cost) / max(abs(before), 1e-30)
            rate = gained / max(began - self.clock.left, 1e-3) + 1e-9
            self.gains[not drawn] = 0.8 * self.gains[not drawn] + 0.2 * rate  # the past fades
        return self.best

    def _found(self, answer: Ints | None) -> bool:
        """Take an answer if it is the best; whether it is."""
        better, kept, cost = False, self.best.answer, self.best.cost
        if answer is not None and (found := self.problem.cost(answer)) < cost:
            better = self.problem.excess(answer) <= 0
            kept, cost = (answer, found) if better else (kept, cost)
        self.best = Result(kept, cost, min(max(self.best.bound, self.prices.bound), cost))
        self.best.log()
        return better

    def _walk(self) -> Iterator[int]:
        """Nodes around one that is drawn, near ones first."""
        queue = [int(self.random.integers(len(self.tables)))]
        seen = set(queue)
        while queue:
            node = queue.pop(int(self.random.integers(min(len(queue), 4))))
            yield node
            new = [other for other in self.tables[node] if other not in seen]
            seen.update(new)
            queue += new

    def _region(self) -> Sequence[int]:
        """Nodes around one that is drawn, so many that a draw takes a small share of the time."""
        count, edges, chosen = len(self.tables), 0, list[int]()
        size = math.exp(self.random.uniform(math.log(20), math.log(20 + 3 * count)))
        most = _SHARE / 6 * self.left / (WORK.pass_edge * _PASSES * (1 + _ORDERS))
        if size > count and 2 * len(self.problem.edges) <= 6 * most:
            return range(count)
        for node in self._walk():
            chosen.append(node)
            edges += len(self.tables[node])
            if len(chosen) >= size or edges > most:
                break
        return chosen

    def draw(self, free: Sequence[int]) -> Ints | None:
        """The best of a few answers; None where none of them is within the limit. Free nodes change
        what they have in the best answer; all do where there is none."""
        self.clock.charge(WORK.draw)
        best = self.best.answer
        scale = float(self.random.choice((0.3, 0.5, 0.8, 1.0, 1.3)))
        scale *= 2.0**self.failures if best is None else 1.0
        noise = self.random.uniform(0.7, 1.4, len(self.tables))
        pairs = zip(self.problem.costs, self.prices.costs(scale), noise, strict=True)
        costs = [cost + (priced - cost) * change for cost, priced, change in pairs]
        whole = best is None or len(free) == len(self.tables)
        wanted = self.prices.messages.decode(costs) if whole or best is None else best
        wanted = self._passes(_PASSES, costs, wanted, free, self.slack.every)
        found, least = None, np.inf
        for _ in range(_ORDERS):
            answer = self._grant(wanted, free)
            if answer is not None and (cost := self.problem.cost(answer)) < least:
                found, least = answer, cost
            if self.left <= 0:
                break
        self.failures += found is None
        return found

    def _grant(self, wanted: Ints, free: Sequence[int]) -> Ints | None:
        """An answer near the one wanted, within the limit."""
        order = self.random.permutation(np.array(free, dtype=np.int64))
        best = self.slack.least if self.best.answer is None else self.best.answer
        base = best.copy()
        base[order] = self.slack.least[order]
        allowed = self.slack.granted(order, base, wanted)
        if allowed is None:  # holding the least may exceed the limit at some time
            allowed = self.slack.granted(order, best, wanted)
        if allowed is None:
            return None
        answer = wanted.copy()
        for node in order.tolist():
            if answer[node] not in allowed[node]:
                total = self._around(node, self.problem.costs[node], answer)[allowed[node]]
                answer[node] = allowed[node][int(total.argmin())]
        answer = self._passes(2, self.problem.costs, answer, free, allowed)
        for _ in range(4):  # give out what is spare
            order = self.random.permutation(order)
            allowed = self.slack.granted(order, answer, None)
            if allowed is None:  # it exceeds the limit by the rounding of sums
                break
            before, answer = answer, self._passes(1, self.problem.costs, answer, free, allowed)
            if (before == answer).all():
                break
        return answer

    def _around(self, node: int, costs: Floats, answer: Ints) -> Floats:
        """What the strategies of a node cost beside what all its neighbours take."""
        rows = (table[:, answer[other]] for other, table in self.tables[node].items())
        return sum(rows, start=costs)

    def _passes(
        self,
        count: int,
        costs: Sequence[Floats],
        answer: Ints,
        free: Sequence[int],
        allowed: Sequence[Ints],
    ) -> Ints:
        """The answer after so many passes, fewer where one changes nothing or time runs out."""
        work = WORK.pass_edge * sum(1 + len(self.tables[node]) for node in free)
        for number in range(count):
            before = answer
            answer = improve(self.tables, costs, answer, free, allowed, self.random)
            self.clock.charge(work)
            if (before == answer).all() or (number and self.left <= 0):
                break
        return answer

    def _solve(self, kept: list[Bools], seconds: float) -> tuple[bool, bool]:
        """Solve with only these strategies; whether it was solved, and gave a better answer."""
        graph = ProblemGraph(self.problem)
        for node, strategies in enumerate(kept):
            graph.keep(node, np.flatnonzero(strategies))
        part, back = graph.result()
        try:
            smaller, onwards = presolve(part, self.clock)
            result = solve_exactly(smaller, self.clock.part(seconds))
        except NoAnswerError:
            return True, False
        if result.answer is None:
            return False, False
        return result.gap <= 1e-9, self._found(back(onwards(result.answer)))

    def _threshold(self, kept: list[Bools], scores: list[Floats], pairs: int) -> list[Bools]:
        """What is kept, and strategies with the least scores, as many as give so many pairs."""
        flat = np.concatenate(scores)
        low, high = 0.0, float(flat[np.isfinite(flat)].max())
        for _ in range(30):
            middle = (low + high) / 2
            counts = [int((k | (s <= middle)).sum()) for k, s in zip(kept, scores, strict=True)]
            total = sum(counts[e.first] * counts[e.second] for e in self.problem.edges)
            low, high = (low, middle) if total > pairs else (middle, high)
        return [k | (s <= low) for k, s in zip(kept, scores, strict=True)]

    def _solve_kernels(self) -> None:
        """Solve growing kernels, as long as that is quick or nothing was found: strategies with the
        least margins, and of each node that of the best answer and that which holds least."""
        pairs = _FIRST_PAIRS
        while self.left > 0 and pairs <= 4 * self.problem.pairs:
            began, margins = self.clock.left, self.prices.margins
            kept = self._threshold([np.zeros(len(m), dtype=bool) for m in margins], margins, pairs)
            for node, own in enumerate(kept):
                own |= margins[node] <= margins[node].min()
                own[self.slack.least[node]] = True
                if self.best.answer is not None:
                    own[self.best.answer[node]] = True
            solved, _ = self._solve(kept, _SHARE * self.left)
            quick = began - self.clock.left < 0.5 * _SHARE * self.left
            if self.best.answer is not None and not (solved and quick):
                break
            pairs *= 2 if quick else 1
            if not quick:  # and nothing was found: other prices have other margins
                self.prices.ascend(self.clock.part(0.1 * self.left), 50)

    def _improve_neighbourhood(self, size: int) -> int:
        """Free a neighbourhood of about `size` pairs; returns the next size."""
        assert self.best.answer is not None
        kept = [np.zeros(len(c), dtype=bool) for c in self.problem.costs]
        for node, strategy in enumerate(self.best.answer):
            kept[node][strategy] = True
        if self.random.random() < 0.5:  # all strategies of nodes around one
            pairs = 0
            for node in self._walk():
                kept[node][:] = True
                pairs += len(kept[node]) * sum(int(kept[o].sum()) for o in self.tables[node])
                if pairs >= size:
                    break
        else:  # everywhere, strategies that cost little more than the ones taken, with noise
            regret = []
            for node, costs in enumerate(self.prices.costs()):
                total = self._around(node, costs, self.best.answer)
                least = np.minimum(self.prices.margins[node], total - total.min())
                regret.append(least * self.random.uniform(0.2, 1.8, len(costs)))
            kept = self._threshold(kept, regret, size + len(self.problem.edges))
        began = self.clock.left
        solved, better = self._solve(kept, _SHARE * self.left)
        if better or (solved and began - self.clock.left >= 0.02 * self.left):
            return size
        return min(int(size * 1.3), 4 * self.problem.pairs) if solved else max(size * 4 // 5, 200)
