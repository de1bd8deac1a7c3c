"""`devices.layout=auto`: chosen once, kept with the run, the same when it is resumed."""

import json

import numpy as np
import pytest

from gshard.mt import hosts
from gshard.mt.errors import UserError
from gshard.mt.run import Run
from gshard.mt.training import layouts, loop
from tests.mt.runs import losses, run_config, with_devices, with_train
from tests.mt.training.test_loop import Notes


def _train(run):
    return loop.train(run, Notes())


@pytest.mark.slow
def test_a_run_keeps_its_layout(corpus, tmp_path, monkeypatch):
    """The losses are those of the paper's annotations; a resumed run chooses nothing."""
    config = run_config(corpus, steps=4, save_every=2, log_every=1)
    paper = Run.create(tmp_path / "paper", config)
    _train(paper)
    chosen = Run.create(tmp_path / "auto", with_devices(config, layout="auto"))
    _train(chosen)
    kept = (chosen.folder / layouts.LAYOUT).read_text()
    assert json.loads(kept)["arguments"]
    wanted, found = losses(paper), losses(chosen)
    assert list(found) == list(wanted)
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, abs=2e-3)
    monkeypatch.setattr(layouts.gshard, "auto", None)
    _train(Run.create(chosen.folder, with_train(chosen.config, steps=6)))
    assert (chosen.folder / layouts.LAYOUT).read_text() == kept
    assert max(losses(Run.open(chosen.folder))) == 6


def _layout(devices):
    axis = [["a"], []]
    return {
        "format": "gshard layout 1",
        "mesh": {"a": devices},
        "arguments": {"[0]": {"shape": [16, 4], "dims": axis}},
    }


def test_a_layout_of_other_devices_or_nonsense_is_refused(tmp_path):
    path = tmp_path / layouts.LAYOUT
    path.write_text(json.dumps(_layout(4)))
    with pytest.raises(UserError, match=r"layout for 4 devices, and the run has 8; remove"):
        layouts.layout_of_run(tmp_path, abs, (), 8)
    path.write_text("{")
    with pytest.raises(UserError, match=r"layout\.json is not JSON.*remove the file"):
        layouts.layout_of_run(tmp_path, abs, (), 8)


def test_a_layout_serves_batches_of_other_shapes(tmp_path):
    (tmp_path / layouts.LAYOUT).write_text(json.dumps(_layout(8)))
    layout = layouts.layout_of_run(tmp_path, abs, (), 8)
    assert layouts.for_shapes(layout, (np.zeros((16, 4)),)) is layout
    (longer,) = layouts.for_shapes(layout, (np.zeros((8, 9)),)).annotations
    assert (longer.shape, longer.dims) == ((8, 9), (("a",), ()))
    (fewer,) = layouts.for_shapes(layout, (np.zeros((4, 9)),)).annotations
    assert (fewer.shape, fewer.dims) == ((4, 9), ((), ()))


def test_settings_that_a_chosen_layout_replaces_are_refused(corpus):
    config = with_devices(run_config(corpus), layout="auto", tensor=2)
    with pytest.raises(UserError, match=r"devices\.layout=auto chooses what devices\.tensor"):
        hosts.strategy(config.devices)
