"""Routes: nothing in a slot or on its way is overwritten before it is read."""

from hypothesis import given
from hypothesis import strategies as st

from gshard.pipelining.schedules import HEAD, IDLE, LOCAL, NAMES, B, F, W, forward_only, make, route


def layers_of(op, here, halves):
    """The first of the layers that a position works on, and how many: it has `here + 2`."""
    lower, count = (here + 2) // 2, here + 2
    parts = {IDLE: (0, 0), B: (lower, count - lower), W: (0, lower)}
    return parts[op] if op == IDLE or (halves and op in (B, W)) else (0, count)


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_a_machine_of_slots_reads_what_it_should(name, stages, rounds, alone):
    schedule = make(name, stages, stages * rounds)
    schedule = forward_only(schedule) if alone else schedule
    last = len(schedule.positions) - 1
    layers = tuple(range(2, last + 3))
    # What is kept costs time: where W follows B at once, both are done in halves.
    routes = route(schedule, layers, (0.0, 1.0, 9.0, 9.0, 0.0, 2.0))
    halves = schedule.is_whole
    assert halves == (not alone and (stages == 1 or not name.startswith("zb")))
    rows, channels = routes.rows, list(routes.send)
    position = {place: n for n, place in enumerate(schedule.positions)}
    inbox, saved, kept = ([{} for _ in range(stages)] for _ in range(3))
    done = set()
    for tick in range(schedule.ticks):
        sent = {}
        for stage in range(stages):
            op, m = rows.op[tick, stage], rows.microbatch[tick, stage]
            here = position[stage, rows.chunk[tick, stage]]
            slots = [table[tick, stage] for table in (rows.inbox, rows.saved, rows.kept)]
            part = (rows.base[tick, stage], rows.layers[tick, stage])
            assert part == layers_of(op, here, halves)
            leaves = op == (W if halves else B) and here == 0
            assert rows.batch[tick, stage] == (m if leaves else schedule.microbatches)
            if op in (F, HEAD):
                assert (op == HEAD) == (here == last)
                assert rows.first[tick, stage] == (here == 0)
                if here:
                    assert inbox[stage].pop(slots[0]) == ("activation", here, m)
                sent[stage] = ("gradient", here, m) if op == HEAD else ("activation", here + 1, m)
                saved[stage][slots[1]] = here, m
            elif op == B:
                assert inbox[stage].pop(slots[0]) == ("gradient", here, m)
                assert saved[stage][slots[1]] == (here, m)
                if halves:
                    sent[stage] = ("half", here, m)
                else:
                    del saved[stage][slots[1]]
                    kept[stage][slots[2]] = here, m
                    sent[stage] = ("gradient", here - 1, m)
            elif op == W and halves:
                assert inbox[stage].pop(slots[0]) == ("half", here, m)
                assert saved[stage].pop(slots[1]) == (here, m)
                sent[stage] = ("gradient", here - 1, m)
            elif op == W:
                assert kept[stage].pop(slots[2]) == (here, m)
            if op != IDLE:
                done.add((F if op == HEAD else op, here, m))
        for number, channel in enumerate(channels):
            (which,) = set(rows.sends[number][tick].tolist())
            pairs = routes.send[channel][which]
            assert channel == LOCAL or all(a != b for a, b in pairs)
            for a, b in pairs:
                slot = rows.receive[number][tick, b]
                assert slot < routes.slots[0]
                assert slot not in inbox[b]
                inbox[b][slot] = sent[a]
    assert done == set(schedule.when)
    assert not any(inbox)
    assert not any(kept)
    assert not halves or routes.slots[2] == 0
