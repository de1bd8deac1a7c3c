"""The server's answer to each kind of request that the benchmark of its memory sends."""

import signal

import pytest

from benchmarks.serve_memory import LANGUAGES, Client, resident, started
from benchmarks.small_run import prepare
from gshard.mt.release.make import make_release
from gshard.mt.run import Run


@pytest.mark.slow
def test_each_kind_of_request_is_answered_as_it_should_be(tmp_path):
    prepare(tmp_path, 1, 1, LANGUAGES, ("vocabulary.directions=both", "vocabulary.source_size=600"))
    release = make_release(Run.open(tmp_path / "prepared"), tmp_path / "release", "untrained")
    server, address = started(release, tmp_path / "log")
    try:
        client = Client(address, LANGUAGES, 0)
        for kind in dict.fromkeys(client.kinds):
            assert kind(), kind.__name__
        assert not client._is_refused(413, "{}")  # a wrong status is noticed
        assert resident(server.pid) > 10
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
