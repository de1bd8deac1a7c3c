"""Which process of how many this is, as whatever started it says in environment variables.

Every launcher has variables of its own. All that are set are read; gshard's own decide, and if two
others contradict each other that is an error, in one line, before anything waits for anybody.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from gshard.errors import UserError

Variables = Mapping[str, str]

_FIRST_PORT, _PORTS = 61_440, 4_096  # from which one is taken by a job's number
_USUAL_PORT = 1_234  # of the coordinator, where a service names the host only
MOST = 1 << 20  # processes
_OVERRIDE = "--coordinator, --processes and --process decide"


@dataclass(frozen=True)
class Hosts:
    """The processes of a run and which of them this is; one, if nothing else is known."""

    coordinator: str = ""  # host:port of process 0
    count: int = 1
    index: int = 0
    launcher: str = ""  # the source of the information

    def checked(self) -> Hosts:
        """These, or an error if they make no sense."""
        who = f"{self.launcher}: " if self.launcher else ""
        if self.count > MOST:
            raise UserError(f"{who}{self.count:,} processes; {MOST:,} are the most")
        if self.count < 1 or not 0 <= self.index < self.count:
            raise UserError(
                f"{who}process {self.index} of {self.count} does not exist; {_OVERRIDE}"
            )
        if self.count > 1 and not _is_address(self.coordinator):
            had = f"{self.coordinator!r} is no" if self.coordinator else "they need a"
            raise UserError(f"{who}{self.count} processes: {had} HOST:PORT of process 0")
        return self


def _is_address(text: str) -> bool:
    """Whether this is HOST:PORT; an IPv6 host is in brackets."""
    match = re.fullmatch(r"(?:[^\s:\[\]]+|\[[\da-fA-F:.]+\]):(\d{1,5})", text)
    return match is not None and 0 < int(match[1]) < 1 << 16


def _with_port(host: str, port: int) -> str:
    """HOST:PORT, unless a port is there already."""
    try:
        return f"[{ipaddress.IPv6Address(host.strip('[]'))}]:{port}"
    except ValueError:
        return host if ":" in host else f"{host}:{port}"


def find(environment: Variables) -> Hosts:
    """What the environment says; one process on its own if it says nothing."""
    found = [hosts for read in _LAUNCHERS if (hosts := read(environment)) is not None]
    if not found:
        return Hosts()
    own = [hosts for hosts in found if hosts.launcher == _OWN]
    if not own and len({(hosts.count, hosts.index) for hosts in found}) > 1:
        told = ", ".join(f"{h.launcher} says {h.index} of {h.count}" for h in found)
        raise UserError(f"which process is this? {told}; {_OVERRIDE}")
    return (own or found)[0].checked()


_OWN = "GSHARD_*"


def _own(environment: Variables) -> Hosts | None:
    """Plain variables, as `gshard launch` sets them."""
    return _plain(environment, _OWN, "GSHARD_COORDINATOR", "GSHARD_PROCESSES", "GSHARD_PROCESS")


def _jax(environment: Variables) -> Hosts | None:
    """The names that JAX's documentation and MaxText use; JAX itself reads the address only."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    known = any(name in environment for name in names[1:])
    return _plain(environment, "JAX_*", *names) if known else None


def _slurm(environment: Variables) -> Hosts | None:
    """A step of Slurm (`srun`); a batch script outside of one is a single process."""
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        return None
    count = _number(environment, "SLURM_STEP_NUM_TASKS", "Slurm", environment.get("SLURM_NTASKS"))
    index = _number(environment, "SLURM_PROCID", "Slurm")
    if count == 1:
        return None
    job = _number(environment, "SLURM_JOB_ID", "Slurm", "0")
    address = f"{_first_host(environment['SLURM_STEP_NODELIST'])}:{_FIRST_PORT + job % _PORTS}"
    return Hosts(address, count, index, "Slurm")


def _open_mpi(environment: Variables) -> Hosts | None:
    """`mpirun` of Open MPI, whose first versions tell where it was started."""
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    count = _number(environment, "OMPI_COMM_WORLD_SIZE", "Open MPI")
    index = _number(environment, "OMPI_COMM_WORLD_RANK", "Open MPI")
    if count == 1:
        return None
    local = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI", str(0))
    started = re.match(
        r"(\d+)\.\d+;.*?tcp\d*://([\d.]+|\[[\da-fA-F:]+\])",
        environment.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    job = environment.get("PMIX_NAMESPACE", "")
    if started:
        address = f"{started[2]}:{_FIRST_PORT + int(started[1]) % _PORTS}"
    elif local == count:
        address = f"127.0.0.1:{_FIRST_PORT + sum(job.encode()) % _PORTS}"
    else:
        _refuse("Open MPI", "does not say on which host process 0 is; --coordinator HOST:PORT does")
    return Hosts(address, count, index, "Open MPI")


def _kubernetes(environment: Variables) -> Hosts | None:
    """An Indexed Job or a JobSet, whose pods know their index and have names.

    How many there are, and the name of the service, come from the job's file (see the docs).
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    who = "JobSet" if "JOBSET_NAME" in environment else "Kubernetes"
    index = _number(environment, "JOB_COMPLETION_INDEX", who)
    if "PROCESSES_IN_JOB" not in environment:
        if index == 0 and "JOBSET_NAME" not in environment:
            return None  # a job of one pod has an index too
        _refuse(who, "gives an index only: set PROCESSES_IN_JOB in the job's file")
    each = _number(environment, "PROCESSES_IN_JOB", who)
    jobs = _number(environment, "JOBS", who, "1")
    job_index = _number(environment, "JOB_INDEX", who, "0")
    if index >= each or job_index >= jobs:
        _refuse(who, f"pod {index} of {each} in job {job_index} of {jobs} cannot be")
    if each * jobs == 1:
        return None
    if "JAX_COORDINATOR_ADDRESS" in environment:
        address = environment["JAX_COORDINATOR_ADDRESS"]
    elif "JOBSET_NAME" in environment:
        name = environment["JOBSET_NAME"]
        job = environment.get("REPLICATED_JOB_NAME") or _refuse(
            who, "REPLICATED_JOB_NAME is not set"
        )
        address = f"{name}-{job}-0-0.{name}:{_USUAL_PORT}"
    elif service := environment.get("SERVICE_NAME"):
        pod = environment.get("HOSTNAME", "")
        if not pod.endswith(f"-{index}"):
            _refuse(who, f"HOSTNAME {pod!r} does not end in this pod's index {index}")
        address = f"{pod.removesuffix(f'-{index}')}-0.{service}:{_USUAL_PORT}"
    else:
        _refuse(who, "SERVICE_NAME, the job's headless service, is not set")
    place = _with_port(address, _USUAL_PORT)
    return Hosts(place, each * jobs, index + each * job_index, who)


def _kubeflow(environment: Variables) -> Hosts | None:
    """Kubeflow's training operator: its JAXJob, or the names of its PyTorchJob."""
    for address, port, count, index in (
        ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"),
        ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
    ):
        if count in environment and (index in environment or address in environment):
            if (processes := _number(environment, count, "Kubeflow")) == 1:
                return None
            where = environment.get(address, "")
            if where:
                usual = _number(environment, port, "Kubeflow", str(_USUAL_PORT))
                where = _with_port(where, usual)
            return Hosts(where, processes, _number(environment, index, "Kubeflow"), "Kubeflow")
    return None


_LAUNCHERS: tuple[Callable[[Variables], Hosts | None], ...] = (
    _own,
    _jax,
    _slurm,
    _open_mpi,
    _kubernetes,
    _kubeflow,
)


def _plain(
    environment: Variables, launcher: str, address: str, count: str, index: str
) -> Hosts | None:
    if not any(name in environment for name in (address, count, index)):
        return None
    for name in (count, index):
        if name not in environment:
            _refuse(launcher, f"{name} is not set")
    numbers = [_number(environment, name, launcher) for name in (count, index)]
    return Hosts(environment.get(address, ""), numbers[0], numbers[1], launcher)


def _number(environment: Variables, name: str, launcher: str, otherwise: str | None = None) -> int:
    text = environment.get(name, otherwise)
    if text is None:
        _refuse(launcher, f"{name} is not set")
    if not re.fullmatch(r"\d{1,18}", text.strip()):
        _refuse(launcher, f"{name} is {text[:40]!r}, and not a whole number")
    return int(text)


def _first_host(nodes: str) -> str:
    """The first of a list as Slurm writes it: `r[1-2]n[03-05,9]-ib,login` begins with r1n03-ib."""
    match = re.fullmatch(r"((?:[^\[\],]|\[\w[^\[\]]*\])+)(?:,.*)?", nodes)
    if not match:
        _refuse("Slurm", f"SLURM_STEP_NODELIST is {nodes!r}, and no list of hosts")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])


def _refuse(launcher: str, why: str) -> NoReturn:
    raise UserError(f"{launcher}: {why}")
