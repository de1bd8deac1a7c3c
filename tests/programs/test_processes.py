"""Devices of several processes: nothing in the core assumes that one process sees all shards."""

import socket
import subprocess
import sys


def test_two_processes_compute_what_one_does():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.programs.two_processes", port]
    running = [
        subprocess.Popen(
            [*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(2)
    ]
    for number, process in enumerate(running):
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-3000:]
        assert f"process {number} done" in output
