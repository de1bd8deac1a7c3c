"""`devices.layout=auto`: chosen once, kept with the run, the same when it is resumed."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import gshard
from gshard.errors import UserError
from gshard.mt import hosts
from gshard.mt.config import DeviceConfig, override
from gshard.mt.launch.local import free_port, member
from gshard.mt.run import Run
from gshard.mt.training import kept as layouts
from gshard.mt.training import loop
from gshard.mt.training.prepare import setup_of
from gshard.mt.training.programs import readable
from gshard.nn.config import GatingConfig
from tests.mt.runs import losses, run_config, with_devices, with_train
from tests.mt.training.test_loop import Notes

PATIENCE = 1800  # seconds: machines that run tests are busy


def _train(run):
    return loop.train(run, loop.Hooks(Notes()))


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


@pytest.mark.slow
def test_a_run_in_stages_learns_as_without(corpus, tmp_path):
    """Both stacks in two stages of four devices, with nothing random."""
    config = run_config(corpus, steps=3, save_every=3, log_every=1)
    model = dataclasses.replace(
        config.model, encoder_layers=4, decoder_layers=4, input_dropout=0.0, residual_dropout=0.0,
        attention_dropout=0.0, gating=GatingConfig(second_expert="all", min_capacity=4),
    )  # fmt: skip
    found = []
    for name, assignments in (("one", []), ("staged", ["devices.stages=2"])):
        settings = override(dataclasses.replace(config, model=model), assignments)
        run = Run.create(tmp_path / name, settings)
        _train(run)
        found.append(losses(run))
    assert list(found[1]) == list(found[0]) == [1, 2, 3]
    np.testing.assert_allclose(*(list(f.values()) for f in found), rtol=1e-4)


def test_strategies_in_stages():
    found = hosts.strategy(DeviceConfig(count=8, stages=2, tensor=2))
    assert (found.devices, found.stages, found.microbatches) == (8, 2, 4)
    assert (found.inside.expert, found.inside.tensor, found.inside.stages) == (2, 2, 1)
    with pytest.raises(UserError, match=r"=3 times devices.tensor=1 does not"):
        hosts.strategy(DeviceConfig(count=8, stages=3))
    with pytest.raises(UserError, match="split_update is for weights on all devices"):
        hosts.strategy(DeviceConfig(count=8, stages=2, split_update=True))


def test_every_stage_needs_a_pair_of_layers(corpus, tmp_path):
    config = override(run_config(corpus), ["devices.stages=2"])
    with pytest.raises(UserError, match=r"stages=2; pairs of layers in a stack: 1"):
        setup_of(Run.create(tmp_path / "run", config))


# A host with a folder of its own: the layout it gets, and what it computes with it.
WORKER = """
import os, sys
from pathlib import Path
import jax, numpy as np
import jax.numpy as jnp
import gshard
from gshard.mt import hosts
from gshard.mt.launch.environment import Hosts
from gshard.mt.training import kept as layouts

me = int(os.environ["GSHARD_PROCESS"])
hosts.start(4, Hosts(os.environ["GSHARD_COORDINATOR"], 2, me))
if me:  # the others choose nothing
    layouts.gshard = type("Imported", (), {"Layout": gshard.Layout})


def step(state, x):
    return {"w": state["w"] - 0.125 * jnp.tanh(x @ state["w"]).T @ x}, jnp.sum(x)


arguments = {"w": jnp.ones((48, 48))}, jnp.ones((4096, 48))
layout = layouts.layout_of_run(Path(sys.argv[1], str(me)), step, arguments, 4)
(state, total) = gshard.jit(step, annotations=layout, devices=jax.devices())(*arguments)
mean = jax.jit(jnp.mean, out_shardings=None)(state["w"])
print(f"{float(mean):.1f} {float(total):.1f}")
"""


@pytest.mark.slow
def test_hosts_with_folders_of_their_own_get_the_same_layout(tmp_path):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = []
    for host in range(2):
        (tmp_path / str(host)).mkdir()
        environment = {**os.environ, **member(address, 2, host)}
        command = [sys.executable, "-c", WORKER, str(tmp_path)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    printed = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    kept = [(tmp_path / str(host) / layouts.LAYOUT).read_text() for host in range(2)]
    assert kept[0] == kept[1]
    assert np.prod(list(json.loads(kept[0])["mesh"].values())) == 4
    mean, total = 1 - 0.125 * 4096, 4096 * 48  # tanh(48) is 1
    assert [text.splitlines()[-1] for text in printed] == [f"{mean:.1f} {total:.1f}"] * 2


def _gshard(*words):
    """A command, which has to succeed."""
    command = [sys.executable, "-m", "gshard.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_command_that_is_resumed_keeps_its_layout(corpus, tmp_path):
    """One process with 4 devices of its own."""
    config = with_devices(run_config(corpus, save_every=2, log_every=1), count=4, layout="auto")
    kept = []
    for steps in (2, 4):
        folder = Run.create(tmp_path / "auto", with_train(config, steps=steps)).folder
        _gshard("train", folder)
        kept.append((folder / layouts.LAYOUT).read_text())
    assert kept[0] == kept[1]
    assert np.prod(list(json.loads(kept[0])["mesh"].values())) == 4
    assert list(losses(Run.open(folder))) == [1, 2, 3, 4]


@pytest.mark.slow
def test_two_processes_train_with_the_layout_of_the_first(corpus, tmp_path):
    """The losses are those of one process with the paper's annotations."""
    config = run_config(corpus, steps=4, save_every=4, log_every=1)
    paper = Run.create(tmp_path / "paper", with_devices(config, count=2))
    _train(paper)
    together = Run.create(tmp_path / "auto", with_devices(config, count=2, layout="auto"))
    _gshard("launch", "-n", "2", "train", together.folder)
    assert json.loads((together.folder / layouts.LAYOUT).read_text())["mesh"] == {"a": 2}
    wanted, found = losses(paper), losses(Run.open(together.folder))
    assert list(found) == list(wanted)
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, abs=2e-3)


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


def test_figures_are_replicated_whatever_the_layout():
    """Each host reads them."""

    def step(x):
        return readable({"load": 2.0 * gshard.split(x, 0, 8), "loss": x.sum()})

    found = gshard.jit(step, devices=8).lower(np.zeros((16, 4), np.float32)).out_shardings
    assert [sharding.tiles for sharding in jax.tree.leaves(found)] == [(1, 1), ()]


def test_settings_that_a_chosen_layout_replaces_are_refused(corpus):
    config = with_devices(run_config(corpus), layout="auto", tensor=2)
    with pytest.raises(UserError, match=r"devices\.layout=auto chooses what devices\.tensor"):
        hosts.strategy(config.devices)
