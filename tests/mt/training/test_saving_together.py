"""A save that fails on one host fails on all of them alike, and is tried again by all."""

import os
import subprocess
import sys

import pytest

from gshard.mt.launch.local import free_port, member

PATIENCE = 600  # seconds: machines that run tests are busy; Orbax's own would be 1200
FAULTS = ["array 1", "array 0", "array 01", "note 0", "commit 0", "removal 0", "room 0", "room 1"]

# Saves twice for every fault: once with it, and once when there is room again.
WORKER = """
import errno, os, sys
from pathlib import Path
import jax, numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from gshard.mt import hosts
from gshard.mt.launch.environment import Hosts
from gshard.mt.training import checkpoint

folder, faults, me = Path(sys.argv[1]), sys.argv[2:], os.environ["GSHARD_PROCESS"]
hosts.start(2, Hosts(os.environ["GSHARD_COORDINATOR"], 2, int(me)))
now = ""


def refused(*arguments, **named):
    raise OSError(errno.ENOSPC, "No space left on device")


def break_call(owner, name, fault):
    usual = getattr(owner, name)

    def call(*arguments, **named):
        return (refused if now == fault else usual)(*arguments, **named)

    setattr(owner, name, call)


class Refused:
    result = cancel = refused


def break_writing(handler, fault):
    usual = handler.async_save

    async def save(*arguments, **named):
        futures = await usual(*arguments, **named)
        return [*futures, Refused()] if now == fault else futures

    handler.async_save = save


checkpoints = checkpoint.Checkpoints(folder, keep=1)
break_writing(ocp.StandardCheckpointHandler, "array")
break_writing(ocp.JsonCheckpointHandler, "note")
break_call(checkpoint, "write_checksums", "commit")
break_call(type(checkpoints._manager._checkpoint_deleter), "delete_steps", "removal")
break_call(checkpoint.tempfile, "TemporaryFile", "room")
places = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
for step in range(1, 2 * len(faults) + 1):
    what, where = faults[step // 2 - 1].split()
    now = what if step % 2 == 0 and me in where else ""
    tree = {"w": jax.make_array_from_callback((8,), places, lambda i: np.arange(8.0)[i] * step)}
    try:
        checkpoints.save(step, tree, tree, {"step": step}, 100.0 - step)
        checkpoints.wait()
        print(step, "saved", flush=True)
    except checkpoint.SaveError as error:
        print(error, flush=True)
print(checkpoints.steps)
checkpoints.close()
"""


@pytest.mark.slow
def test_all_hosts_hear_of_it_and_save_again(tmp_path):
    said = saved_by_two(tmp_path)
    assert said[0] == said[1]
    for step, line in enumerate(said[0][:-1], 1):
        if step % 2:
            assert line == f"{step} saved"
        else:
            assert line.startswith(f"step {step} could not be saved"), line
            assert "the disk is full" in line
    assert len(said[0]) == 2 * len(FAULTS) + 1
    assert said[0][-1] == f"[{2 * len(FAULTS) - 1}]"


def saved_by_two(folder):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), *FAULTS],
            env={**os.environ, **member(address, 2, index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    return [[line for line in out.splitlines() if "Gloo" not in line] for out, _ in said]
