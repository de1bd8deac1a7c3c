"""A collective's time: the paper's growth in D, hand-counted links, and device assignments."""

import itertools

import numpy as np
import pytest

from gshard.forecast.collective import collective_seconds, collective_terms
from gshard.forecast.hardware import hardware
from gshard.forecast.topology import Network, Switch, Torus, squarest

MB = 2**20


def torus(*shape, wrap=True, bandwidth=1.0, per_chip=1, hop=0.0):
    wraps = tuple(wrap and n > 2 for n in shape)
    return Torus(shape, wraps, per_chip, bandwidth, hop)


def neighbours(n):
    return tuple((i, (i + 1) % n) for i in range(n))


def test_a_message_loads_every_link_on_its_way():
    line = torus(4, wrap=False)
    assert collective_seconds(line, "collective_permute", 6, pairs=((0, 3), (1, 2))) == 12
    assert collective_seconds(line, "collective_permute", 6, pairs=((0, 1), (2, 3))) == 6
    assert collective_seconds(line, "collective_permute", 6, pairs=((0, 3), (3, 0))) == 6


def test_a_ring_is_shorter_the_other_way_round():
    ring = torus(8, hop=1.0)
    assert collective_seconds(ring, "collective_permute", 4, pairs=((0, 7),)) == 4 + 1
    # Half way round there are two shortest ways, which share the load.
    assert collective_seconds(ring, "collective_permute", 4, pairs=((0, 4),)) == 2 + 4


def test_dimension_order_routes_on_a_grid():
    grid = torus(2, 3, wrap=False)
    # 0 is (0, 0), 5 is (1, 2): down first, then along row 1, where 3 -> 5 goes as well.
    assert collective_seconds(grid, "collective_permute", 1, pairs=((0, 5), (3, 4))) == 2


@pytest.mark.parametrize("n", [4, 8])
def test_a_ring_reduces_at_the_rate_of_two_links(n):
    size = 1200
    expected = 2 * size * (n - 1) / n / 2
    assert collective_seconds(torus(n), "all_reduce", size) == pytest.approx(expected)
    assert collective_seconds(torus(n), "reduce_scatter", size) == pytest.approx(expected / 2)
    assert collective_seconds(torus(n), "all_gather", size // n) == pytest.approx(expected / 2)


def test_a_two_dim_torus_uses_all_four_links():
    size, n = 1600, 16
    expected = 2 * size * (n - 1) / n / 4
    assert collective_seconds(torus(4, 4), "all_reduce", size) == pytest.approx(expected)


def test_all_to_all_is_bound_by_the_middle_of_a_line():
    # Of 4 devices on a line, 2 send half of what they have over the link in the middle.
    assert collective_seconds(torus(4, wrap=False), "all_to_all", 8) == 8


def test_cores_of_one_chip_share_its_links():
    alone = collective_seconds(torus(4, 4), "all_to_all", MB)
    shared = collective_seconds(torus(4, 4, per_chip=2), "all_to_all", MB)
    assert shared == pytest.approx(2 * alone)
    reduced = [collective_seconds(torus(4, 4, per_chip=k), "all_reduce", MB) for k in (1, 2)]
    assert reduced[1] == pytest.approx(reduced[0], rel=0.1)  # summed within the chip first


@pytest.mark.parametrize("name", ["tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "h100"])
def test_the_growth_in_devices_is_the_papers(name):
    machine = hardware(name)

    def seconds(kind, devices, size=32 * MB):
        return collective_seconds(machine.topology(devices), kind, size, pairs=neighbours(devices))

    few, many = 64, 1024
    assert seconds("all_reduce", many) < 2 * seconds("all_reduce", few)
    gathered = seconds("all_gather", many) / seconds("all_gather", few)
    assert 0.4 * many / few < gathered < 2.1 * many / few
    grown = seconds("all_to_all", many) / seconds("all_to_all", few)
    assert grown < 1.1 * np.sqrt(many / few)
    assert seconds("collective_permute", many) < 1.2 * seconds("collective_permute", few)


def test_all_to_all_grows_with_the_side_of_a_torus():
    times = [collective_seconds(torus(n, n), "all_to_all", MB) for n in (4, 8, 16, 32)]
    assert np.diff(np.log2(times)) == pytest.approx([1, 1, 1], abs=0.05)


A = ((0, 1, 2, 3), (4, 5, 6, 7))
B = ((0, 2, 4, 6), (1, 3, 5, 7))
GRAY = ((0, 1, 3, 2), (4, 5, 7, 6))

# The paper's appendix A.3: a 2 x 4 split that communicates along its rows. Which of two device
# assignments is right depends on how the devices are joined; the first of each pair is.
ASSIGNMENTS = {
    "2 x 4 torus": (torus(2, 4, hop=1.0), A, B),
    "4 x 2 torus": (torus(4, 2, hop=1.0), B, A),
    "2 x 4 mesh": (torus(2, 4, wrap=False, hop=1.0), A, B),
    "4 x 2 mesh": (torus(4, 2, wrap=False, hop=1.0), B, A),
    "2 x 2 x 2 torus": (torus(2, 2, 2, hop=1.0), GRAY, A),
    "nodes of 4 on a switch": (Switch(8, 4, 9.0, 1.0, 0.0, 0.0), A, B),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_the_right_assignment_of_the_papers_example_is_preferred(name):
    """Each partition sends to the next one in its row."""
    topology, right, wrong = ASSIGNMENTS[name]
    good, bad = (
        collective_seconds(
            topology,
            "collective_permute",
            MB,
            pairs=tuple(p for row in a for p in itertools.pairwise(row)),
        )
        for a in (right, wrong)
    )
    assert good < bad


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "reduce_scatter"])
def test_rows_stay_within_a_node(kind):
    topology, right, wrong = ASSIGNMENTS["nodes of 4 on a switch"]
    good, bad = (collective_seconds(topology, kind, MB, a) for a in (right, wrong))
    assert 2 * good < bad


def test_between_nodes_each_device_sends_its_own_part():
    switch = Switch(16, 8, 9.0, 1.0, 0.0, 0.0)
    # 7/8 inside a node at 9, then an eighth of the operand between two nodes at 1; and back.
    expected = 2 * (72 * 7 / 8 / 9 + 9 * 1 / 2)
    assert collective_seconds(switch, "all_reduce", 72) == pytest.approx(expected)


def test_groups_of_one_take_no_time():
    assert collective_seconds(torus(4), "all_reduce", MB, ((0,), (1,), (2,), (3,))) == 0


def test_the_squarest_grid():
    assert squarest(1024, 2) == (32, 32)
    assert squarest(512, 2) == (16, 32)
    assert squarest(4096, 3) == (16, 16, 16)
    assert squarest(7, 2) == (1, 7)


def test_an_unknown_network_is_named():
    with pytest.raises(ValueError, match="'star'; allowed are 'torus' and 'switch'"):
        Network("star").topology(8)


def test_an_unknown_collective_is_named():
    with pytest.raises(ValueError, match="'gossip'; allowed are all_reduce"):
        collective_seconds(torus(4), "gossip", 1)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("groups", [(), ((0, 1, 2, 3), (4, 5, 6, 7))])
def test_threads_of_a_process_meet_once_for_a_collective(kind, groups):
    """The bytes take as long as behind a switch; of its steps, one latency is left."""
    threads = Switch(8, 8, 100.0, 100.0, 7.0, 7.0, single_step=True)
    behind_switch = Switch(8, 8, 100.0, 100.0, 7.0, 7.0)
    bandwidth, latency = collective_terms(threads, kind, 800, groups)
    assert latency == 7.0
    assert bandwidth == collective_terms(behind_switch, kind, 800, groups)[0]
    permuted = [
        collective_terms(t, "collective_permute", 8, pairs=((0, 1),))
        for t in (threads, behind_switch)
    ]
    assert permuted[0] == permuted[1]
