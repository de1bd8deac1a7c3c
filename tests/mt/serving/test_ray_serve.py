"""The server on a Ray cluster of this machine: the same routes, from two replicas."""

import os
import signal
import threading
import urllib.request

import pytest
from libretranslatepy import LibreTranslateAPI

from gshard.errors import UserError
from gshard.mt.decoding.engines import EngineConfig, open_translator
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.launch.local import free_port
from gshard.mt.run import Run
from gshard.mt.serving.settings import Settings
from gshard.mt.serving.workers import Served
from tests.mt.processes import PATIENCE
from tests.mt.runs import make_run
from tests.mt.serving.slow_translator import until

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
# Ray's own, of the libraries that it imports.
pytestmark = pytest.mark.filterwarnings("ignore")

SEARCH = TranslateConfig(beam=2, nbest=2, rows=4, longest=16)
ENGINE = EngineConfig("onnx", "int8", 1)


@pytest.fixture
def cluster(monkeypatch):
    # A busy machine is not a dead one: Ray kills what is not up within seconds.
    for name in ("READY_CHECK", "HEALTH_CHECK"):
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "300")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


def running():
    from gshard.mt.serving.ray_serve import NAME

    found = serve.status().applications[NAME].deployments[NAME].replica_states
    return {str(state): count for state, count in found.items()}


@pytest.mark.slow
def test_two_replicas_answer_as_one_server(cluster, tokenizer, tmp_path):
    from gshard.mt.serving.ray_serve import NAME, RayServer

    folder = make_run(tmp_path / "random", tokenizer).folder
    settings = Settings(port=free_port("127.0.0.1"), is_open=True)
    server = RayServer.start(Served(folder, "best", SEARCH, engine=ENGINE), settings, 2)
    base = f"http://127.0.0.1:{settings.port}/"
    assert server.address.startswith(base)
    assert running() == {"RUNNING": 2}

    client = LibreTranslateAPI(base)
    translator, _ = open_translator(Run.open(folder), config=SEARCH, engine=ENGINE)
    texts = ["one two", "three four five", "six"]
    for text, (best, *_) in zip(texts, translator.translate(texts, "de"), strict=True):
        assert client.translate(text, "auto", "de") == best.text
    assert "de" in {target for known in client.languages() for target in known["targets"]}
    with urllib.request.urlopen(f"{base}ready", timeout=PATIENCE) as reply:
        assert reply.status == 200
    with pytest.raises(UserError, match="has an application 'gshard' in Ray Serve already"):
        RayServer.start(server.served, settings, 1)

    replica = next(
        actor
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if NAME in actor["name"] and actor["name"].startswith("SERVE_REPLICA")
    )
    ray.kill(ray.get_actor(**replica))
    until(lambda: running() != {"RUNNING": 2})
    until(lambda: running() == {"RUNNING": 2})  # another one in its place
    assert client.translate("one two", "auto", "de")

    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    server.run()
    assert NAME not in serve.status().applications


def test_what_ray_cannot_do_is_said(tmp_path, monkeypatch):
    from gshard.mt.serving import ray_serve

    served = Served(tmp_path, "best", SEARCH)
    with pytest.raises(UserError, match="--on ray needs a port"):
        ray_serve.RayServer.start(served, Settings(port=0), 1)
    with pytest.raises(UserError, match="unknown argument 'worker'; did you mean 'workers'"):
        ray_serve.app({"run": "x", "worker": "2"})
    with pytest.raises(UserError, match="workers=two is not a whole number"):
        ray_serve.app({"run": "x", "workers": "two"})
    with pytest.raises(UserError, match="run=FOLDER is missing"):
        ray_serve.app({})

    def nothing(*_, **__):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", nothing)
    with pytest.raises(UserError, match="found no Ray cluster"):
        ray_serve.connect()
