"""A module of torch as a step: data parallel bytes, and batches of other sizes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from gshard.comparing.comparison import compare
from gshard.comparing.fits import fits
from gshard.comparing.step import Step
from gshard.forecast import hardware

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def test_a_module_is_compared_and_fits():
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    step = Step(module, (jax.ShapeDtypeStruct((8192, 64), np.float32),))
    found = compare(step, "h100")
    weights = 4 * (64 * 128 + 128 + 128 * 8)  # the gradient of the last bias is a constant
    assert [p.sent for p in found.programs] == [2 * weights * 7 // 8] * 2
    assert sum(row.xla - row.gshard for row in found.lines) == 0
    room = fits(step, hardware("h100"))
    assert room.fits
    assert room.batch == 8192 < room.largest


class Sums(torch.nn.Module):
    """A stack over a new dim is none over the batch, with which torch would merge it."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(3)])

    def forward(self, x):
        return torch.stack([torch.tanh(layer(x)) for layer in self.layers]).sum(0)


class Labelled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 8, bias=False)

    def forward(self, *, labels, x):
        return torch.nn.functional.cross_entropy(self.head(x), labels)


def test_inputs_by_name():
    def inputs(rows):
        x = jax.ShapeDtypeStruct((rows, 64), np.float32)
        return {"x": x, "labels": jax.ShapeDtypeStruct((rows,), np.int64)}

    step = Step(Labelled(), (inputs(64),))
    for given in (step, step.with_args((*step.args[:2], inputs(128)))):
        found = given.by_gshard(hardware("h100"))
        weight, labels = 64 * 8 * 4, 4  # the loss is divided by how many labels there are
        assert sum(c.bytes for c in found.collectives) == 2 * 7 * (weight + labels) // 8


def test_a_stack_of_the_batch_sends_the_weights_alone():
    step = Step(Sums(), (jax.ShapeDtypeStruct((128, 64), np.float32),))
    found = compare(step, "h100")
    assert [p.sent for p in found.programs] == [2 * 7 * 3 * 64 * 64 * 4 // 8] * 2
    assert found.lines == ()
    assert found.same[0] == 1  # a line of this file in both
    layout = step.by_auto(devices=8, hardware="h100", memory="80 KB", seconds=1)
    assert "  params['layers.0.weight']: P(" in str(layout)


def test_layers_of_a_module_computed_again_are_a_change():
    layers = [
        torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    ]
    module = torch.nn.Sequential(*layers * 4)
    step = Step(module, (jax.ShapeDtypeStruct((65536, 64), np.float32),))
    found = fits(step, replace(hardware("h100"), memory=2_000_000))
    change, needed = found.changes[0]
    assert change == "layers computed again: from_torch(..., remat=)"
    assert needed < 0.7 * found.needed
    assert step.with_remat().with_remat() is None
