"""Clients that send their requests slowly or never, and that do not take their answers."""

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time

import pytest

from gshard.mt.serving import server as serving
from gshard.mt.serving.server import Server
from gshard.mt.serving.service import About
from gshard.mt.serving.settings import LOCAL, Settings
from tests.mt.processes import PATIENCE


class Service:
    """There is no model behind it."""

    about = About("made up", 1, ("de",), ("en",), "en", 2, 2, 2, 10)
    health = {"waiting": 0}  # noqa: RUF012


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(serving, "IDLE", 0.5)
    server = Server(Service(), Settings(port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join()


def health(port):
    connection = http.client.HTTPConnection(LOCAL, port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status


def ended(wire):
    """Whether the server ends a connection; what it sends before is left out."""
    with contextlib.suppress(ConnectionResetError):
        while wire.recv(65_536):
            pass
    return True  # else the socket's own time limit has passed, and is raised


def connect(server):
    return socket.create_connection((LOCAL, server.port), timeout=PATIENCE)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: ",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /health HT",  # the second one
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nabc",
    ],
)
def test_who_does_not_send_a_request_is_left(server, begun):
    with connect(server) as wire:
        wire.sendall(begun)
        assert ended(wire)
    assert health(server.port) == 200


def test_a_byte_now_and_then_is_no_request(server):
    head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
    with connect(server) as wire:
        wire.sendall(head)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:  # until it is ended
                wire.sendall(b"x")
                time.sleep(0.05)
    assert health(server.port) == 200


def test_who_does_not_take_the_answer_is_left(server):
    page = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        wire.settimeout(PATIENCE)
        wire.connect((LOCAL, server.port))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(2000):  # until the server stops to read, or ends it
                wire.sendall(page)
        until_few(server, 0)


def until_few(server, count):
    while len(server._server.server_state.connections) > count:
        time.sleep(0.02)


def test_a_slow_one_is_ended_for_a_newcomer(server, monkeypatch):
    monkeypatch.setattr(serving, "IDLE", 1e6)
    monkeypatch.setattr(serving, "most_connections", lambda: 4)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connect(server)) for _ in range(8)]
        for wire in wires:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert health(server.port) == 200
        assert all(ended(wire) for wire in wires[:4])


FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from gshard.mt.serving.server import Server
from gshard.mt.serving.settings import Settings
from tests.mt.serving.test_connections import Service
server = Server(Service(), Settings(port=0))
print(server.port, flush=True)
server.run()
"""


@pytest.mark.slow
def test_unfinished_headers_and_few_descriptors():
    """As many connections as there are descriptors, and more: newcomers are served all the time."""
    command = [sys.executable, "-c", FEW]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        for _ in range(300):
            wire = stack.enter_context(socket.create_connection((LOCAL, port), timeout=PATIENCE))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.sendall(b"POST / HTTP/1.1\r\nHost: ")
        assert [health(port) for _ in range(20)] == [200] * 20
        process.kill()
        assert process.stderr.read() == b""
