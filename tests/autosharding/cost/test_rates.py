"""What moves along the axes of a mesh take: likely prices, and the least."""

import itertools
import math

import pytest

from gshard.autosharding.cost import NONE, PartialSum, Rates, specs_of
from gshard.autosharding.cost.lower_bound import LowerBoundRates
from gshard.forecast.hardware import hardware

MACHINE = hardware("h100")


def test_large_collectives_pay_their_latency():
    """As combined in lowered programs: those that take long to copy are not, nor exchanges."""
    largest = int(MACHINE.cost_model.largest_combined) // 8 * 8
    alone, least = Rates(MACHINE, (8,)), LowerBoundRates(MACHINE, (8,), largest)
    for spec in ((NONE,), (0,)):
        for size in (largest, largest + 8):
            partial = PartialSum((size,), 1, (NONE,), (0,))
            alike = [rates.sums(partial, spec) for rates in (alone, least)]
            assert alike[1] < alike[0] if size == largest else alike[1] == pytest.approx(alike[0])
    for size in (largest, largest + 8):
        tables = [rates.reshards((size, 8), 1) for rates in (alone, least)]
        none, rows, columns = range(3)
        assert tables[1][rows, columns] == pytest.approx(tables[0][rows, columns])
        gathered = [rates.reshards((size,), 1)[1, none] for rates in (alone, least)]
        small = size == largest
        assert gathered[1] < gathered[0] if small else gathered[1] == pytest.approx(gathered[0])


@pytest.mark.parametrize("name", ["h100", "tpu-v4", "cpu"])
def test_moves_along_two_axes_cost_no_more_than_one_collective_for_both(name):
    """A mesh of one axis has the same devices in one group: all that it can do, two axes can."""
    machine = hardware(name)
    one, two = LowerBoundRates(machine, (8,), math.inf), LowerBoundRates(machine, (2, 4), math.inf)
    shape = (64, 64)
    both = {spec: n for n, spec in enumerate(specs_of(shape, (2, 4)))}
    for here, spec in enumerate(specs_of(shape, (8,))):
        for there, other in enumerate(specs_of(shape, (8,))):
            joint = two.reshards(shape, 4)[both[spec * 2], both[other * 2]]
            assert joint <= one.reshards(shape, 4)[here, there] * (1 + 1e-12)
        for other in specs_of(shape, (8,)) if spec == (NONE,) else ():
            partial = [PartialSum(shape, 4, spec * n, tuple(range(n))) for n in (1, 2)]
            sums = [
                r.sums(p, other * n) for r, p, n in zip((one, two), partial, (1, 2), strict=True)
            ]
            assert sums[1] <= sums[0] * (1 + 1e-12)


def test_two_axes_that_change_places_may_be_one_permutation():
    """Of tiles that a device has and another one needs, all are sent once."""
    least, shape = LowerBoundRates(MACHINE, (4, 2), 0.0), (8192, 8192)
    number = {spec: n for n, spec in enumerate(specs_of(shape, (4, 2)))}
    table, tile = least.reshards(shape, 4), 8192 * 8192 * 4 / 8
    swapped = table[number[0, 1], number[1, 0]]
    assert swapped < table[number[0, 1], number[1, 1]] + table[number[1, 1], number[1, 0]]
    assert swapped >= tile / MACHINE.network.inside_bandwidth


def test_reshards_cost_nothing_where_nothing_is_sent():
    table = Rates(hardware("h100"), (2, 4)).reshards((64, 64), 4)
    specs = specs_of((64, 64), (2, 4))
    for (i, source), (j, target) in itertools.product(enumerate(specs), repeat=2):
        only_cuts = all(s in (t, -1) for s, t in zip(source, target, strict=True))
        assert (table[i, j] == 0) == only_cuts
