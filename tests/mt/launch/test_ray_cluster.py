"""A Ray cluster on this machine, whose nodes a test takes away and gives back."""

import subprocess
import sys
import threading
import time

import pytest

from gshard.mt.launch.supervisor import Supervisor, Timeouts
from tests.mt.processes import alive

ray = pytest.importorskip("ray")

# Makes steps until the test says that it is enough; SIGTERM saves.
WORKER = """
import os, pathlib, signal, sys, time
from gshard.mt.launch.status import reporting

folder = pathlib.Path(sys.argv[1])
index, count = (os.environ[f"GSHARD_PROCESS{s}"] for s in ("", "ES"))
signal.signal(signal.SIGTERM, lambda *_: (folder.joinpath(f"saved-{index}").touch(), os._exit(143)))
with reporting() as reporter:
    step = 0
    while not folder.joinpath("enough").exists():
        step += 1
        reporter.tell("training", step)
        folder.joinpath(f"here-{count}-{index}").touch()
        time.sleep(0.1)
"""


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    # A busy machine is not a dead node.
    patient = {"health_check_period_ms": 1000, "health_check_failure_threshold": 20}
    head = {"num_cpus": 1, "_system_config": patient}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=1)
    made.connect()
    yield made
    ray.shutdown()
    made.shutdown()


def until(true):
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(cluster, tmp_path):
    """Three nodes, then two, then three again, by what the cluster says alone."""
    from gshard.mt.launch.ray_cluster import RayCluster

    third = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    notes, status = [], []

    def everyone(count):
        return all((tmp_path / f"here-{count}-{i}").exists() for i in range(count))

    def train():
        timeouts = Timeouts(joining=2.0, stopping=60.0)
        command = [sys.executable, "-c", WORKER, str(tmp_path)]
        supervisor = Supervisor(RayCluster(), command, 3, notes.append, timeouts, least=1)
        status.append(supervisor.run())

    thread = threading.Thread(target=train)
    thread.start()
    try:
        until(lambda: everyone(3))
        cluster.remove_node(third, allow_graceful=False)
        until(lambda: everyone(2))
        for path in tmp_path.glob("here-3-*"):
            path.unlink()
        cluster.add_node(num_cpus=1)
        until(lambda: everyone(3))
    finally:
        (tmp_path / "enough").touch()
        thread.join()
    assert status == [0], notes
    # Ray may list the lost node for a while, and then one more start fails.
    asides = ("lags", "a step again", "where they are")
    lost, *_, fewer, more = [note for note in notes if not any(word in note for word in asides)]
    assert "was ended by SIGKILL" in lost
    assert "its node is gone" in lost
    assert fewer == "2 of 3 processes are started"
    assert more == "there is room for 3 processes: all save and start again"
    assert (tmp_path / "saved-0").exists()


DRIVER = """
import sys
from gshard.mt.launch.ray_cluster import RayCluster
from gshard.mt.launch.supervisor import Supervisor

address, *command = sys.argv[1:]
Supervisor(RayCluster(address), command, 2, print).run()
"""


@pytest.mark.slow
def test_when_the_driver_is_killed_its_processes_end(cluster, tmp_path):
    worker = WORKER.replace("step = 0", "step = 0; (folder / index).write_text(str(os.getpid()))")
    command = [sys.executable, "-c", worker, str(tmp_path)]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster.address, *command])
    until(lambda: all((tmp_path / f"here-2-{i}").exists() for i in range(2)))
    workers = [int((tmp_path / str(i)).read_text()) for i in range(2)]
    assert all(map(alive, workers))
    driver.kill()
    driver.wait()
    until(lambda: not any(map(alive, workers)))  # Ray may end them before they have saved
