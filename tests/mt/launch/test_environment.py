"""Every launcher's environment, as it sets it, and contradictions in one line."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gshard.commands.options import members
from gshard.errors import UserError
from gshard.mt import hosts
from gshard.mt.launch.company import MissingHostsError
from gshard.mt.launch.environment import Hosts, find
from gshard.mt.launch.local import free_port

SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05,09],login1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:33911",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-laptop-81245@1",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOB_INDEX": "2",
    "JOBS": "3",
    "PROCESSES_IN_JOB": "4",
    "JOBSET_NAME": "mt",
    "REPLICATED_JOB_NAME": "train",
    "HOSTNAME": "mt-train-2-1",
}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "3",
    "PROCESSES_IN_JOB": "4",
    "SERVICE_NAME": "mt-pods",
    "HOSTNAME": "mt-3",
}
JAX_JOB = {
    "COORDINATOR_ADDRESS": "mt-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "3",
    "PROCESS_ID": "2",
}
PYTORCH_JOB = {
    "MASTER_ADDR": "mt-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "0",
}
PLAIN = {"GSHARD_COORDINATOR": "a:1", "GSHARD_PROCESSES": "2", "GSHARD_PROCESS": "1"}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Hosts()),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, Hosts()),
        (PLAIN, Hosts("a:1", 2, 1, "GSHARD_*")),
        (JAX, Hosts("10.0.0.1:1234", 2, 0, "JAX_*")),
        (SLURM, Hosts(f"gpu03:{61440 + 70123 % 4096}", 4, 2, "Slurm")),
        ({**SLURM, "SLURM_STEP_NODELIST": "one"}, Hosts("one:61931", 4, 2, "Slurm")),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "rack[2-3]n[07,09-11]-ib,login"},
            Hosts("rack2n07-ib:61931", 4, 2, "Slurm"),
        ),
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, Hosts()),  # the batch script
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Hosts()),
        (OPEN_MPI_4, Hosts(f"10.96.0.1:{61440 + 1531576320 % 4096}", 8, 5, "Open MPI")),
        (
            OPEN_MPI_5,
            Hosts(f"127.0.0.1:{61440 + sum(b'prterun-laptop-81245@1') % 4096}", 2, 1, "Open MPI"),
        ),
        (
            {**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": "7.0;usock;tcp6://[fd00::1]:33911"},
            Hosts("[fd00::1]:61447", 8, 5, "Open MPI"),
        ),
        (JOBSET, Hosts("mt-train-0-0.mt:1234", 12, 9, "JobSet")),
        (INDEXED_JOB, Hosts("mt-0.mt-pods:1234", 4, 3, "Kubernetes")),
        ({"JOB_COMPLETION_INDEX": "0"}, Hosts()),  # a job of one pod
        (
            {**INDEXED_JOB, "JAX_COORDINATOR_ADDRESS": "x"},
            Hosts("x:1234", 4, 3, "Kubernetes"),
        ),
        (JAX_JOB, Hosts("mt-worker-0:6666", 3, 2, "Kubeflow")),
        (PYTORCH_JOB, Hosts("mt-master-0:23456", 3, 0, "Kubeflow")),
        (
            {**PYTORCH_JOB, "MASTER_ADDR": "fd00::5"},
            Hosts("[fd00::5]:23456", 3, 0, "Kubeflow"),
        ),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "a"}, Hosts()),
        ({"WORLD_SIZE": "8"}, Hosts()),  # anybody may have set that
        ({**SLURM, **PLAIN}, Hosts("a:1", 2, 1, "GSHARD_*")),  # ours decide
        # srun starts mpi processes that agree with it.
        (
            {**SLURM, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            Hosts("gpu03:61931", 4, 2, "Slurm"),
        ),
    ],
)
def test_what_each_launcher_says(environment, expected):
    assert find(environment) == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({**PLAIN, "GSHARD_PROCESS": "2"}, "GSHARD_*: process 2 of 2 does not exist"),
        ({**PLAIN, "GSHARD_PROCESS": "one"}, "GSHARD_PROCESS is 'one', and not a whole number"),
        ({**PLAIN, "GSHARD_COORDINATOR": "host"}, "'host' is no HOST:PORT"),
        ({"GSHARD_PROCESSES": "2"}, "GSHARD_PROCESS is not set"),
        ({"GSHARD_PROCESSES": "2", "GSHARD_PROCESS": "0"}, "2 processes: they need a HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is not set"),
        ({**SLURM, "SLURM_PROCID": "-1"}, "Slurm: SLURM_PROCID is '-1'"),
        ({**SLURM, "SLURM_PROCID": "4"}, "Slurm: process 4 of 4 does not exist"),
        ({**SLURM, **OPEN_MPI_4}, "Slurm says 2 of 4, Open MPI says 5 of 8"),
        ({**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "does not say on which host"),
        ({"JOB_COMPLETION_INDEX": "2"}, "set PROCESSES_IN_JOB in the job's file"),
        ({**INDEXED_JOB, "HOSTNAME": "mt-1-abcde"}, "does not end in this pod's index 3"),
        ({k: v for k, v in INDEXED_JOB.items() if k != "SERVICE_NAME"}, "SERVICE_NAME"),
        ({k: v for k, v in JOBSET.items() if k[:3] != "REP"}, "REPLICATED_JOB_NAME is not set"),
        ({**PLAIN, "GSHARD_COORDINATOR": "host:99999"}, "'host:99999' is no HOST:PORT"),
        ({**PLAIN, "GSHARD_COORDINATOR": "host:0"}, "'host:0' is no HOST:PORT"),
        ({**PLAIN, "GSHARD_COORDINATOR": "fd00::1:1234"}, "'fd00::1:1234' is no HOST:PORT"),
        ({**PLAIN, "GSHARD_PROCESSES": "9" * 5000}, "GSHARD_PROCESSES is '999"),
        ({**PLAIN, "GSHARD_PROCESSES": "1" + "0" * 17}, "GSHARD_*: 100,000,000,000,000,000 proc"),
        ({**PLAIN, "GSHARD_PROCESSES": "2147483648"}, "1,048,576 are the most"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "9" * 18}, "1,048,576 are the most"),
        ({**OPEN_MPI_4, "OMPI_COMM_WORLD_SIZE": "9" * 18}, "1,048,576 are the most"),
        ({**JOBSET, "JOBS": "9" * 18}, "1,048,576 are the most"),
        ({**JAX_JOB, "NUM_PROCESSES": "9" * 18}, "1,048,576 are the most"),
        ({**PLAIN, "GSHARD_PROCESSES": "²"}, "'²', and not a whole number"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[03"}, "'gpu[03', and no list of hosts"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "'', and no list of hosts"),
        ({**JOBSET, "JOB_COMPLETION_INDEX": "4"}, "JobSet: pod 4 of 4 in job 2 of 3 cannot be"),
        ({**JOBSET, "JOB_INDEX": "3"}, "JobSet: pod 1 of 4 in job 3 of 3 cannot be"),
        ({k: v for k, v in PYTORCH_JOB.items() if k != "RANK"}, "Kubeflow: RANK is not set"),
        ({**JAX_JOB, "COORDINATOR_ADDRESS": ""}, "Kubeflow: 3 processes: they need a HOST:PORT"),
    ],
)
def test_contradictions_are_one_line(environment, said):
    with pytest.raises(UserError) as refused:
        find(environment)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command_line_decides(monkeypatch):
    for name, value in {**SLURM, **OPEN_MPI_4}.items():
        monkeypatch.setenv(name, value)
    assert members("a:1", 2, 1) == Hosts("a:1", 2, 1)
    assert members("", 1, None) == Hosts()  # whatever is found, this one works alone
    with pytest.raises(UserError, match="which process is this"):
        members("", None, 1)
    with pytest.raises(UserError, match="process 3 of 1 does not exist"):
        members("", 1, 3)
    for name in OPEN_MPI_4:
        monkeypatch.delenv(name)
    assert members("", None, None) == Hosts("gpu03:61931", 4, 2, "Slurm")
    assert members("b:7", None, None) == Hosts("b:7", 4, 2, "Slurm")
    assert members("", 8, 5) == Hosts("gpu03:61931", 8, 5, "Slurm")


# What a process does with it: it meets the others, and says who came.
MEETING = """
import socket
from jax.experimental import multihost_utils
import numpy as np
from gshard.mt import hosts
from gshard.commands.options import members

found = members("", None, None)
hosts.start(0, found)
met = multihost_utils.process_allgather(np.array([found.index, found.count]))
print(f"{found.launcher} {met.tolist()}")
if found.index == 0:
    host, _, port = found.coordinator.rpartition(":")
    for place in (host, "127.0.0.2"):  # the second is this machine too
        with socket.socket() as probe:
            print(f"listens at {place} {probe.connect_ex((place, int(port))) == 0}")
"""
HERE = "127.0.0.1"
# Each launcher's variables for process `index` of two on this machine.
ON_LOOPBACK = {
    "GSHARD_*": lambda index, port: {
        "GSHARD_COORDINATOR": f"{HERE}:{port}",
        "GSHARD_PROCESSES": "2",
        "GSHARD_PROCESS": index,
    },
    "JAX_*": lambda index, port: {
        "JAX_COORDINATOR_ADDRESS": f"{HERE}:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": index,
    },
    "Slurm": lambda index, port: {
        "SLURM_JOB_ID": str(port - 61_440),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": index,
        "SLURM_STEP_NODELIST": HERE,
    },
    "Open MPI": lambda index, port: {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": index,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_orte_hnp_uri": f"{port - 61_440}.0;tcp://{HERE},10.0.0.1:33911",
    },
    "JobSet": lambda index, port: {
        "JOB_COMPLETION_INDEX": "0",
        "JOB_INDEX": index,
        "JOBS": "2",
        "PROCESSES_IN_JOB": "1",
        "JOBSET_NAME": "mt",
        "REPLICATED_JOB_NAME": "train",
        "JAX_COORDINATOR_ADDRESS": f"{HERE}:{port}",  # there are no names of pods here
    },
    "Kubernetes": lambda index, port: {
        "JOB_COMPLETION_INDEX": index,
        "PROCESSES_IN_JOB": "2",
        "JAX_COORDINATOR_ADDRESS": f"{HERE}:{port}",
    },
    "Kubeflow": lambda index, port: {
        "COORDINATOR_ADDRESS": HERE,
        "COORDINATOR_PORT": str(port),
        "NUM_PROCESSES": "2",
        "PROCESS_ID": index,
    },
}


def a_jobs_port():
    """A port that nobody listens on, of those that follow from the number of a job."""
    for number in range(os.getpid(), os.getpid() + 4096):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HERE, 61_440 + number % 4096))
            return 61_440 + number % 4096
    raise AssertionError("no port is free")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ON_LOOPBACK)
def test_two_processes_of_each_launcher_meet(launcher):
    port = a_jobs_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING],
            env={**os.environ, **ON_LOOPBACK[launcher](str(index), port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    for index, process in enumerate(processes):
        said, _ = process.communicate(timeout=300)
        assert f"{launcher} [[0, 2], [1, 2]]" in said, said
        if index == 0:  # lines of Gloo may stand between these
            assert all(f"listens at 127.0.0.{n} {n == 1}" in said for n in (1, 2)), said


# Only one process of two comes; the command is `gshard`, so that its exit status is looked at.
ALONE = """
import sys
from gshard import cli
from gshard.mt import hosts
hosts._COMING, hosts._ASKING = 3, 0.1
cli.app.command("meet")(lambda: hosts.start(0, hosts.Hosts(sys.argv[1], 2, int(sys.argv[2]))))
cli.main(["meet"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_one_that_never_comes_is_a_sentence_and_no_abort(index):
    place = f"{HERE}:{a_jobs_port()}"
    done = subprocess.run(
        [sys.executable, "-c", ALONE, place, str(index)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 75, done
    said = f"gshard: process {index} of 2 could not meet the others at {place} within 3 s"
    assert done.stderr.splitlines()[-1].startswith(said), done.stderr


@pytest.mark.parametrize(
    "place",
    ["192.0.2.77:61999", "no-such-host.invalid:1234", "{taken}", "x" * 64 + ":80", "a..b:80"],
)
def test_who_cannot_listen_says_so(place, monkeypatch):
    monkeypatch.setattr(hosts, "_ASKING", 0.1)
    with socket.socket() as other:
        other.bind((HERE, 0))
        other.listen()
        place = place.format(taken=f"{HERE}:{other.getsockname()[1]}")
        with pytest.raises(MissingHostsError, match=f"process 0 cannot listen at {place}"):
            hosts._refuse_to_listen_elsewhere(place)
    hosts._refuse_to_listen_elsewhere(f"{HERE}:{a_jobs_port()}")


def test_the_job_files_set_what_is_read():
    jobs = Path(__file__).parents[3] / "examples" / "jobs"
    text = (jobs / "jobset.yaml").read_text()
    for name in ("PROCESSES_IN_JOB", "JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX"):
        assert f"name: {name}" in text
    assert subprocess.run(["bash", "-n", jobs / "slurm.sh"]).returncode == 0


def test_who_comes_before_the_first_one_waits_until_it_listens():
    port, listens = free_port("127.0.0.1"), threading.Event()
    first = socket.socket()

    def come_later():
        time.sleep(0.1)
        listens.set()
        first.bind(("127.0.0.1", port))
        first.listen()

    thread = threading.Thread(target=come_later)
    thread.start()
    try:
        hosts._until_it_listens(f"127.0.0.1:{port}")
        assert listens.is_set()
    finally:
        thread.join()
        first.close()


def test_one_that_never_comes_is_left_to_jax_to_tell(monkeypatch):
    monkeypatch.setattr(hosts, "_ASKING", 0.1)
    hosts._until_it_listens(f"127.0.0.1:{free_port('127.0.0.1')}")
