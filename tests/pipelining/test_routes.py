"""Routes: nothing in a slot or on its way is overwritten before it is read."""

from hypothesis import given
from hypothesis import strategies as st

from gshard.pipelining.routes import HEAD, LOCAL, route
from gshard.pipelining.schedules import IDLE, NAMES, B, F, W, forward_only, make


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_a_machine_of_slots_reads_what_it_should(name, stages, rounds, alone):
    schedule = make(name, stages, stages * rounds)
    schedule = forward_only(schedule) if alone else schedule
    routes, last = route(schedule), len(schedule.positions) - 1
    position = {place: n for n, place in enumerate(schedule.positions)}
    inbox, saved, kept = ([{} for _ in range(stages)] for _ in range(3))
    done = set()
    for tick in range(schedule.ticks):
        sent = {}
        for stage in range(stages):
            op, m = routes.op[tick, stage], routes.microbatch[tick, stage]
            here = position[stage, routes.chunk[tick, stage]]
            slots = [table[tick, stage] for table in (routes.inbox, routes.saved, routes.kept)]
            if op in (F, HEAD):
                assert (op == HEAD) == (here == last)
                assert routes.first[tick, stage] == (here == 0)
                if here:
                    assert inbox[stage].pop(slots[0]) == ("activation", here, m)
                sent[stage] = ("gradient", here, m) if op == HEAD else ("activation", here + 1, m)
                saved[stage][slots[1]] = here, m
            elif op == B:
                assert inbox[stage].pop(slots[0]) == ("gradient", here, m)
                assert saved[stage].pop(slots[1]) == (here, m)
                kept[stage][slots[2]] = here, m
                sent[stage] = ("gradient", here - 1, m)
            elif op == W:
                assert kept[stage].pop(slots[2]) == (here, m)
            if op != IDLE:
                done.add((F if op == HEAD else op, here, m))
        for channel, sets in routes.send.items():
            pairs = sets[routes.sends[channel][tick]]
            assert channel == LOCAL or all(a != b for a, b in pairs)
            for a, b in pairs:
                slot = routes.receive[channel][tick, b]
                assert slot < routes.slots[0]
                assert slot not in inbox[b]
                inbox[b][slot] = sent[a]
    assert done == set(schedule.when)
    assert not any(inbox)
    assert not any(kept)
