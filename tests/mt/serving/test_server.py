"""The page and its server: answers beside the translator's, refusals, and a real browser."""

import contextlib
import html
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import Future
from importlib import resources
from typing import ClassVar

import jax
import numpy as np
import pytest

from gshard.errors import UserError
from gshard.mt.batching.tokenizer import START
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.serving.server import Server
from gshard.mt.serving.service import LONGEST, About, Service
from gshard.mt.serving.settings import LOCAL, Settings
from gshard.nn import Batch
from tests.mt.runs import make_run, random_model
from tests.mt.samples import sentence
from tests.mt.serving.slow_translator import slow_translator, until

SMALL = TranslateConfig(beam=3, nbest=3, rows=1, longest=24, most=10)


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_model(tokenizer, encoder_layers=4)


@pytest.fixture(scope="module")
def translator(model, tokenizer):
    return Translator(model, tokenizer, config=SMALL)


def serving(service):
    server = Server(service, Settings(port=0))
    threading.Thread(target=server.run, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def server(translator):
    server = serving(Service(translator, "tried", 7))
    yield server
    server.stop()


def ask(server, method, path, body=None, headers=None):
    inside = path == "/health" or path.startswith("//")
    place = path if inside else f"/{server.token}{path}"
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=240)
    with contextlib.closing(connection):
        connection.request(method, place, body, headers or {})
        with connection.getresponse() as reply:
            return reply, reply.read()


def translate(server, text, **more):
    body = json.dumps({"text": text, **more})
    reply, data = ask(server, "POST", "/translate", body, {"Content-Type": "application/json"})
    assert reply.status == 200, data
    return json.loads(data)


@pytest.mark.slow
def test_an_answer_is_the_translators_with_every_tokens_experts(server, translator, model):
    text = sentence(3)
    answer = translate(server, text, target="de")
    (want,) = translator.translate([text], "de")
    assert answer["translation"] == want[0].text
    assert [a["text"] for a in answer["alternatives"]] == [h.text for h in want]
    np.testing.assert_allclose(
        [a["score"] for a in answer["alternatives"]], [h.score for h in want]
    )
    # The same pair as a batch of its own, with no padding.
    (part,) = answer["parts"]
    (ids,) = translator.tokenizer.encode_source([text], "de")
    batch = Batch.of(np.array([ids]), np.array([want[0].tokens]), pad=-1, start=START)
    routings = jax.jit(lambda m, b: m.routings(b))(model, batch)
    assert part["source"][0]["piece"] == "<2de>"
    assert part["output"][-1]["piece"] == "</s>"
    spoken = "".join(token["piece"] for token in part["source"][1:-1]).replace("▁", " ")
    assert spoken.strip() == text
    for tokens, routing in zip((part["source"], part["output"]), routings, strict=True):
        assert len(tokens) == routing.expert.shape[-1]
        for t, token in enumerate(tokens):
            found = np.array(token["layers"])  # [layers, choices, (expert, weight)]
            np.testing.assert_array_equal(found[..., 0], routing.expert[:, :, 0, t])
            np.testing.assert_allclose(found[..., 1], routing.weight[:, :, 0, t], atol=1e-5)


@pytest.mark.slow
def test_eight_devices_answer_alike(server, model, tokenizer):
    from gshard.nn import Strategy

    service = Service(Translator(model, tokenizer, Strategy(8), SMALL))
    text = sentence(5)
    found = service.submit({"text": text, "target": "de"}).result()
    want = translate(server, text, target="de")
    assert found["translation"] == want["translation"]
    for side in ("source", "output"):
        tokens = zip(found["parts"][0][side], want["parts"][0][side], strict=True)
        for one, other in tokens:
            assert one["piece"] == other["piece"]
            np.testing.assert_allclose(one["layers"], other["layers"], atol=1e-4)


@pytest.mark.slow
def test_long_blank_and_odd_text(server, translator):
    text = "\n".join([sentence(1), sentence(2), sentence(3), "x" * 60])
    answer = translate(server, text, target="de")
    assert len(answer["parts"]) > 3
    one_line = " ".join(text.split())
    assert answer["translation"] == translator.translate([one_line], "de")[0][0].text
    for blank in ("", " \n\t", "\u200b", "\ufeff"):
        empty = translate(server, blank)
        assert (empty["translation"], empty["parts"]) == ("", [])
    for odd in ("a\0b", "\ud800b", "👩‍👩‍👧‍👦", "\u202eabc", "e\u0301"):
        assert translate(server, odd)["parts"]


def test_many_at_once(server, translator):
    texts = [sentence(n) for n in range(6)]
    found = {}

    def work(text):
        found[text] = translate(server, text, target="ru")["translation"]

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = translator.translate(texts, "ru")
    assert [found[text] for text in texts] == [hypotheses[0].text for hypotheses in want]


def test_the_page_and_the_model(server):
    reply, data = ask(server, "GET", "/?q=x")
    assert reply.status == 200
    page = data.decode()
    script = resources.files("gshard.mt.serving").joinpath("page.js").read_text("utf-8")
    assert f"<script>\n{script}" in page
    # Nothing from outside, and no way to make markup of text.
    assert not re.search(r"https?:|//\w|\bsrc\s*=|@import|url\(|<link", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", page)
    assert not re.search(r"\son\w+\s*=\s*[\"']", page)
    policy = reply.getheader("Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    reply, data = ask(server, "GET", "/model")
    about = json.loads(data)
    assert about["targets"] == about["sources"] == ["de", "en", "fr", "ru"]
    assert (about["name"], about["step"], about["experts"]) == ("tried", 7, 8)


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("POST", "/translate", "{", JSON, 400, "no JSON"),
        ("POST", "/translate", b"\xff\xfe\xff", JSON, 400, "no JSON"),
        ("POST", "/translate", "[" * 70_000, JSON, 400, "no JSON"),
        ("POST", "/translate", "[]", JSON, 400, "no JSON object"),
        ("POST", "/translate", '{"text": 5}', JSON, 400, "`text` is a string"),
        ("POST", "/translate", "{}", JSON, 400, "`text` (the text) is missing"),
        ("POST", "/translate", '{"text": "a", "target": ["de"]}', JSON, 400, "is a string"),
        ("POST", "/translate", '{"text": "a", "target": "dde"}', JSON, 400, "did you mean 'de'"),
        ("POST", "/translate", json.dumps({"text": "a" * (LONGEST + 1)}), JSON, 413, "too many"),
        ("POST", "/translate", "a" * 100_000, JSON, 413, "at most"),
        ("POST", "/translate", '{"text": "a"}', {"Content-Type": "text/plain"}, 415, "text/plain"),
        ("POST", "/", "{}", JSON, 405, "POST is not what this takes"),
        ("GET", "/translate", None, {}, 405, "GET is not"),
        ("PUT", "/translate", "{}", JSON, 405, "PUT is not"),
        ("DELETE", "/", None, {}, 405, "DELETE is not"),
        ("BREW", "/", None, {}, 405, "BREW"),
        ("GET", "/../../etc/passwd", None, {}, 404, "nothing at"),
        ("GET", "/<script>", None, {}, 404, "nothing at"),
        ("GET", "//wrong-token/", None, {}, 404, "has a token"),
        ("POST", "//wrong-token/translate", '{"text": "a"}', JSON, 404, "has a token"),
        ("GET", "/", None, {"Host": "evil.example"}, 403, "answers as"),
    ],
)
def test_refusals_are_json(server, method, path, body, headers, status, message):
    reply, data = ask(server, method, path, body, headers)
    assert reply.status == status
    assert reply.getheader("Content-Type") == "application/json"
    assert message in json.loads(data)["error"]
    assert ask(server, "GET", "/model")[0].status == 200  # it goes on


def test_rubbish_on_the_wire(server):
    for rubbish in (b"\x16\x03\x01\x00\xff\xff\n\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection((LOCAL, server.port), timeout=30) as wire:
            wire.sendall(rubbish)
            wire.shutdown(socket.SHUT_WR)
            answer = wire.makefile("rb").read()
        assert b"Traceback" not in answer
        assert b"<html" not in answer
    assert ask(server, "GET", "/model")[0].status == 200


def test_a_port_in_use(server, translator):
    for port in (server.port, 99_999):
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            Server(Service(translator), Settings(port=port))


@pytest.fixture
def slow(model, tokenizer):
    return slow_translator(model, tokenizer)


@pytest.mark.slow
def test_nothing_is_translated_for_a_client_who_has_left(slow):
    server = serving(Service(slow))
    body = json.dumps({"text": sentence(1), "target": "de"}).encode()
    request = (
        f"POST /{server.token}/translate HTTP/1.1\r\nHost: {LOCAL}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    with socket.create_connection((LOCAL, server.port), timeout=240) as stays:
        stays.sendall(request)
        until(lambda: len(slow.batches) == 1)
        with socket.create_connection((LOCAL, server.port), timeout=30) as leaves:
            leaves.sendall(request.replace(b"river", b"xxxxx").replace(b"mountain", b"yyyyyyyy"))
            until(lambda: json.loads(ask(server, "GET", "/health")[1])["waiting"] == 2)
        time.sleep(1.0)  # the server looks now and then
        slow.on.release()
        assert stays.recv(20).startswith(b"HTTP/1.1 200")
    until(lambda: json.loads(ask(server, "GET", "/health")[1])["waiting"] == 0)
    assert len(slow.batches) == 1
    server.stop()


@pytest.mark.parametrize("path", ["/translate", "/nothing"])
def test_the_body_of_a_refused_request_is_not_the_next_request(server, path):
    """A request in a request: past the check of the name, if a server were careless."""
    inside = f"GET /{server.token}/model HTTP/1.1\r\nHost: {LOCAL}\r\n\r\n".encode()
    head = (
        f"POST /{server.token}{path} HTTP/1.1\r\nHost: evil.example\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(inside)}\r\n\r\n"
    ).encode()
    with socket.create_connection((LOCAL, server.port), timeout=30) as wire:
        wire.sendall(head + inside)
        wire.shutdown(socket.SHUT_WR)
        answer = wire.makefile("rb").read()
    assert answer.count(b"HTTP/1.1") == 1
    assert b"403" in answer.splitlines()[0]


def test_slow_connections_take_no_threads_and_hold_nobody_up(server):
    before = threading.active_count()
    wires = [socket.create_connection((LOCAL, server.port), timeout=30) for _ in range(100)]
    for wire in wires:
        wire.sendall(b"POST / HTTP/1.1\r\nHost: ")
    assert ask(server, "GET", "/model")[0].status == 200
    assert threading.active_count() <= before + 4
    for wire in wires:
        wire.close()


# A browser.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here")


def browse(server, **query):
    """The page after its scripts have run, and what they said on the console."""
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    alone = ["--disable-sync", "--disable-background-networking", "--disable-component-update"]
    heard = ["--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom"]
    address = server.address + "?" + urllib.parse.urlencode(query)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *quiet, *alone, *heard, f"--user-data-dir={profile}", address]
        done = subprocess.run(command, capture_output=True, timeout=120)
    said = [line for line in done.stderr.decode().splitlines() if "CONSOLE" in line]
    return done.stdout.decode(), said


def shown(dom, element):
    """The text of the element with an id, without markup."""
    (inside,) = re.findall(rf'<(\w+)[^>]*\bid="{element}"[^>]*>(.*?)</\1>', dom, re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", inside[1]))


@needs_chromium
def test_a_browser_shows_the_translation_and_the_experts(server):
    text = sentence(3)
    answer = translate(server, text, target="de")
    dom, said = browse(server, q=text, to="de")
    assert (said, shown(dom, "name")) == ([], "tried")
    assert [shown(dom, n) for n in ("translation", "into")] == [answer["translation"], "German"]
    assert "From English, French, German, Russian; into" in shown(dom, "languages")
    assert f"{server.address}translate" in shown(dom, "api")
    assert dom.count('<button type="button" lang=') == 4  # an example for each language
    assert re.search(r'data-health="(ready|warming up)"', dom)
    assert dom.count('<li><span class="text"') == 3
    (part,) = answer["parts"]
    assert len(re.findall('class="token[ "]', dom)) == len(part["source"]) + len(part["output"])
    # Two layers with experts in the encoder, one in the decoder.
    assert dom.count('class="strip"') == 2 * len(part["source"]) + len(part["output"])
    expert, weight = part["source"][1]["layers"][0][0]
    label = re.findall(r'aria-label="([^"]*layer 2[^"]*)"', dom)[1]
    assert f"layer 2 expert {expert} {round(100 * weight)} %" in label
    used = {e for t in part["source"] + part["output"] for layer in t["layers"] for e, _ in layer}
    assert dom.count('class="swatch"') == len(used)


class Malicious:
    """A model whose every word is markup."""

    bad = "</script><img src=x onerror=\"alert('owned')\"><script>alert('owned')</script>&lt;b&gt;"
    about = About(bad, 1, ("de", bad), ("en", bad), "en", 2, 2, 2, 10)
    health: ClassVar = {"status": "ready", "compiling": 0, "waiting": 0}

    def submit(self, request):
        answer = Future()
        if request["text"] == "fail":
            answer.set_exception(RuntimeError(self.bad))
        else:
            answer.set_result(self.translate(request))
        return answer

    def translate(self, request):
        token = {"piece": self.bad, "layers": [[[0, 0.7], [1, 0.3]]]}
        said = {"text": self.bad, "score": -1.0}
        return {
            "target": self.bad, "translation": request["text"] + self.bad, "score": -1.0,
            "alternatives": [said, said], "seconds": 0.1,
            "parts": [{"text": self.bad, "source": [token], "output": [token]}],
        }  # fmt: skip


@needs_chromium
@pytest.mark.slow
def test_nothing_that_is_shown_becomes_markup(capfd):
    server = serving(Malicious())
    try:
        dom, said = browse(server, q=Malicious.bad, to=Malicious.bad)
        assert said == []
        assert "<img" not in dom
        assert dom.count("<script>") == 1
        assert shown(dom, "translation") == 2 * Malicious.bad
        assert shown(dom, "name") == Malicious.bad
        (title,) = re.findall(r"<title>(.*?)</title>", dom)
        assert html.unescape(title) == f"{Malicious.bad} \u2013 gshard"
        dom, _ = browse(server, q="fail")
        assert "something went wrong" in shown(dom, "error")
        assert "RuntimeError" not in dom
        assert "RuntimeError" in capfd.readouterr().err
    finally:
        server.stop()


def test_the_command(tokenizer, tmp_path):
    run = make_run(tmp_path / "random", tokenizer)
    words = ["-m", "gshard.cli", "serve", str(run.folder), "--port=0", "--devices=1"]
    # Ctrl-C, which a test that runs in the background would hand on as ignored, is heeded.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    begin = f"{heed}; os.execv(sys.executable, [sys.executable, *{words}])"
    command = [sys.executable, "-c", begin]

    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        contextlib.ExitStack() as at_last,
    ):
        at_last.callback(process.kill)
        line = process.stdout.readline().decode()
        port, token = re.search(r"http://127.0.0.1:(\d+)/([\w-]+)/", line).groups()
        connection = http.client.HTTPConnection(LOCAL, int(port), timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", f"/{token}/model")
            about = json.loads(connection.getresponse().read())
        assert (about["name"], about["step"]) == ("random", 5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
