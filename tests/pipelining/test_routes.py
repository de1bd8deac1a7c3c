"""Routes: nothing in a slot or on its way is overwritten before it is read."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gshard.pipelining.schedules import (
    BOTH,
    HEAD,
    IDLE,
    NAMES,
    B,
    F,
    W,
    forward_only,
    make,
    route,
)  # fmt: skip


def layers_of(op, here, joined):
    """The first of the layers that a position works on, and how many: it has `here + 2`."""
    lower, count = (here + 2) // 2, here + 2
    return {B: (lower, count - lower), W: (0, lower)}[op] if joined else (0, count)


def deliver(routes, tick, sent, inbox):
    """Put what was sent in a tick into slots that are free."""
    for number, (distance, sets) in enumerate(routes.send.items()):
        (which,) = set(routes.rows.sends[number][tick].tolist())
        for a in np.flatnonzero(sets[which]):
            b = a + distance
            assert 0 <= b < len(inbox)
            slot = routes.rows.receive[number][tick, b]
            assert slot < routes.slots[0]
            assert slot not in inbox[b]
            inbox[b][slot] = sent[a]


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_a_machine_of_slots_reads_what_it_should(name, stages, rounds, alone):
    schedule = make(name, stages, stages * rounds)
    schedule = forward_only(schedule) if alone else schedule
    last = len(schedule.positions) - 1
    layers = tuple(range(2, last + 3))
    # What is kept costs time: where W follows B at once, both are done in halves.
    routes = route(schedule, layers, (0.0, 1.0, 9.0, 9.0, 0.0, 2.0))
    if not name.startswith("zb"):
        assert len(schedule.joined) == (0 if alone else len(schedule.when) // 3)
    rows = routes.rows
    position = {place: n for n, place in enumerate(schedule.positions)}
    inbox, saved, kept = ([{} for _ in range(stages)] for _ in range(3))
    done = {}
    for tick in range(schedule.ticks):
        sent = {}
        for stage in range(stages):
            op, m = rows.op[tick, stage], rows.microbatch[tick, stage]
            here = position[stage, rows.chunk[tick, stage]]
            if op == IDLE:
                continue
            slots = [table[tick, stage] for table in (rows.inbox, rows.saved, rows.kept)]
            joined = op == BOTH
            if joined:
                assert (here, m) in schedule.joined
                op = W if (B, here, m) in done else B
            part = (rows.base[tick, stage], rows.layers[tick, stage])
            assert part == layers_of(op, here, joined)
            leaves = op == HEAD if alone else op == (W if joined else B) and here == 0
            assert rows.batch[tick, stage] == (m if leaves else schedule.microbatches)
            if op in (F, HEAD):
                assert (op == HEAD) == (here == last)
                assert (slots[0] == routes.slots[0]) == (here == 0)
                if here:
                    assert inbox[stage].pop(slots[0]) == ("activation", here, m)
                sent[stage] = ("gradient", here, m) if op == HEAD else ("activation", here + 1, m)
                saved[stage][slots[1]] = here, m
            elif op == B:
                assert inbox[stage].pop(slots[0]) == ("gradient", here, m)
                assert saved[stage][slots[1]] == (here, m)
                if joined:
                    sent[stage] = ("half", here, m)
                else:
                    del saved[stage][slots[1]]
                    kept[stage][slots[2]] = here, m
                    sent[stage] = ("gradient", here - 1, m)
            elif joined:
                assert inbox[stage].pop(slots[0]) == ("half", here, m)
                assert saved[stage].pop(slots[1]) == (here, m)
                sent[stage] = ("gradient", here - 1, m)
            else:
                assert kept[stage].pop(slots[2]) == (here, m)
            done[F if op == HEAD else op, here, m] = tick
        deliver(routes, tick, sent, inbox)
    assert done == schedule.when
    assert not any(inbox)
    assert not any(kept)
    assert routes.slots[2] <= (2 * stages + 2 if name.startswith("zb") else 0)
