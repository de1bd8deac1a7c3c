"""LibreTranslate's routes, by its own client and by others; keys, events, metrics and logs."""

import base64
import contextlib
import hashlib
import http.client
import json
import logging
import re
import shutil
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
from libretranslatepy import LibreTranslateAPI
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families

from gshard.errors import UserError
from gshard.mt.decoding.detect import Detector
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.serving import openapi, settings
from gshard.mt.serving.documents import from_html, from_text
from gshard.mt.serving.server import Server
from gshard.mt.serving.service import Service
from gshard.mt.serving.settings import LOCAL, Key, Settings
from tests.mt.runs import random_model
from tests.mt.samples import sentence
from tests.mt.serving.slow_translator import Slow, echo, until

SMALL = TranslateConfig(beam=3, nbest=3, rows=4, longest=24, most=10)
OPEN = Settings(port=0, is_open=True, characters=1000, texts=5)


@pytest.fixture(scope="module")
def translator(tokenizer):
    return Translator(random_model(tokenizer), tokenizer, config=SMALL)


@pytest.fixture(scope="module")
def service(tokenizer):
    """Of tests that look at no translation."""
    return Service(echo(tokenizer), "tried", 7)


@contextlib.contextmanager
def serving(service, settings, detector=None):
    server = Server(service, settings, detector)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture(scope="module")
def server(translator, corpus):
    service = Service(translator, "tried", 7)
    with serving(service, OPEN, Detector.of(corpus, corpus.languages)) as server:
        yield server


def ask(server, path, given=None, headers=None, method=None):
    """Status, headers and JSON of an answer."""
    body = None if given is None else json.dumps(given)
    headers = {"Content-Type": "application/json", **(headers or {})}
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=240)
    with contextlib.closing(connection):
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        with connection.getresponse() as reply:
            data = reply.read()
            is_json = "json" in reply.getheader("Content-Type", "")
            return reply.status, reply.headers, json.loads(data) if is_json else data.decode()


def best(translator, text, target, read=from_text, n=0):
    """The translation of a document by the translator itself."""
    document = read(text, translator.sentences)
    found = translator.translate(document.sentences, target)
    return document.joined([h[min(n, len(h) - 1)].text for h in found], target)


def test_the_client_of_libretranslate(server, translator):
    client = LibreTranslateAPI(f"http://{LOCAL}:{server.port}/")
    text = f"{sentence(1)} {sentence(2)}\n\n  {sentence(3)}"
    assert client.translate(text, "en", "de") == best(translator, text, "de")
    assert client.detect(sentence(4))[0]["language"] == "en"
    languages = {each["code"]: each for each in client.languages()}
    assert languages["de"] == {"code": "de", "name": "German", "targets": ["en"]}
    assert languages["en"]["targets"] == ["de", "fr", "ru"]


def test_batches_html_alternatives_and_detected_languages(server, translator):
    texts = [sentence(5), "", f"<p>{sentence(6)} <b>{sentence(7)}</b></p>"]
    given = {"q": texts, "source": "auto", "target": "de", "format": "html", "alternatives": 2}
    status, _, answer = ask(server, "/translate", given)
    assert status == 200
    assert answer["translatedText"] == [best(translator, t, "de", from_html) for t in texts]
    assert [len(each) for each in answer["alternatives"]] == [2, 0, 2]
    assert answer["alternatives"][0][0] == best(translator, texts[0], "de", n=1)
    assert [each["language"] for each in answer["detectedLanguage"]] == ["en", "", "en"]
    one = {**given, "q": texts[0]}
    assert ask(server, "/translate", one)[2] == {name: values[0] for name, values in answer.items()}


def test_forms(server, translator):
    want = {"translatedText": best(translator, sentence(8), "ru")}
    given = {"q": sentence(8), "source": "en", "target": "ru", "alternatives": "0"}
    parts = "".join(
        f'--part\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in given.items()
    )
    multipart = {"Content-Type": "multipart/form-data; boundary=part"}  # what `curl -F` sends
    for body, headers in ((urlencode(given), {}), (f"{parts}--part--\r\n", multipart)):
        address = f"http://{LOCAL}:{server.port}/translate"
        request = urllib.request.Request(address, body.encode(), headers)
        with urllib.request.urlopen(request, timeout=240) as reply:
            assert json.load(reply) == want


GOOD = {"q": "a", "source": "en", "target": "de"}


@pytest.mark.parametrize(
    ("path", "given", "status", "message"),
    [
        ("/translate", {**GOOD, "sorce": "x"}, 400, "did you mean 'source'?; allowed are q, sour"),
        ("/translate", {"q": "a"}, 400, "`source` (the language of the text, or auto) is missing"),
        ("/translate", {**GOOD, "source": "xx"}, 400, "allowed are auto, de, en, fr, ru"),
        ("/translate", {**GOOD, "target": "dde"}, 400, "did you mean 'de'"),
        ("/translate", {**GOOD, "target": "en"}, 400, "is to be translated into"),
        ("/translate", {**GOOD, "format": "pdf"}, 400, "allowed are text, html"),
        ("/translate", {**GOOD, "alternatives": -1}, 400, "integer of at least 0"),
        ("/translate", {**GOOD, "alternatives": True}, 400, "integer of at least 0"),
        ("/translate", {**GOOD, "q": 5}, 400, "a string or a list of strings"),
        ("/translate", {**GOOD, "q": ["a", None]}, 400, "a string or a list of strings"),
        ("/translate", {**GOOD, "q": ["a"] * 6}, 413, "6 texts are too many; 5 are allowed"),
        ("/translate", {**GOOD, "q": "a" * 1001}, 413, "1,000 are allowed"),
        ("/translate", {**GOOD, "api_key": "wrong"}, 403, "no such api_key"),
        ("/translate", [GOOD], 400, "no JSON object"),
        ("/detect", {"q": ["a"]}, 400, "`q` is a string"),
        ("/translate_file", {**GOOD, "q": "a"}, 400, "unknown field 'q'"),
        ("/translate_file", {"file": "a", "source": "en", "target": "de"}, 400, "is a file of mul"),
        ("/translate/stream?q=a&source=en", None, 400, "`target` (the language to translate"),
        ("/translate/stream?q=a&source=en&target=xx", None, 400, "does not translate into 'xx'"),
    ],
)
def test_refusals_name_what_is_allowed(server, path, given, status, message):
    found, _, answer = ask(server, path, given)
    assert (found, list(answer)) == (status, ["error"])
    assert message in answer["error"]


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", ""])
def test_bodies_that_are_none(server, kind):
    status, _, answer = ask(server, "/translate", GOOD, {"Content-Type": kind})
    assert status in (400, 415)
    assert list(answer) == ["error"]


def events(server, path, **request):
    """What a browser's EventSource would hear: (event, data) until the stream ends."""
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=240)
    with contextlib.closing(connection):
        connection.request(url=path, **{"method": "GET", **request})
        reply = connection.getresponse()
        assert (reply.status, reply.headers.get_content_type()) == (200, "text/event-stream")
        for block in reply.read().decode().split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            yield lines["event"], json.loads(lines["data"])


def test_sentences_are_events(server, translator):
    text = f"{sentence(9)} {sentence(10)}\n{sentence(11)}"
    given = {"q": text, "source": "en", "target": "fr"}
    *heard, (last, answer) = events(server, f"/translate/stream?{urlencode(given)}")
    assert last == "done"
    assert answer == {"translatedText": best(translator, text, "fr")}
    assert [event for event, _ in heard] == ["sentence"] * len(heard)
    assert [data["sentence"] for _, data in heard] == list(range(len(heard)))
    assert len(heard) >= 3
    for _, data in heard:
        assert data["translatedText"].strip() in answer["translatedText"]
    accepting = {"Accept": "text/event-stream", "Content-Type": "application/json"}
    posted = {"method": "POST", "body": json.dumps({**given, "q": [text]}), "headers": accepting}
    assert list(events(server, "/translate", **posted))[-1] == (
        "done",
        {"translatedText": [answer["translatedText"]]},
    )


def test_keys_and_limits(service, monkeypatch):
    # No text is granted again while slow requests wait.
    monkeypatch.setattr(settings, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    keys = (Key("few", "a key of few", 2), Key("many", "a key of many"))
    with serving(service, Settings(port=0, keys=keys)) as server:
        assert ask(server, "/translate", GOOD)[0] == 403
        assert ask(server, "/languages")[0] == ask(server, "/health")[0] == 200
        few = {**GOOD, "api_key": "a key of few"}
        assert [ask(server, "/translate", few)[0] for _ in range(2)] == [200, 200]
        status, headers, answer = ask(server, "/translate", few)
        assert (status, "2 texts per minute" in answer["error"]) == (429, True)
        assert 1 <= int(headers["Retry-After"]) <= 30
        bearer = {"Authorization": "Bearer a key of many"}
        assert ask(server, "/translate", GOOD, bearer)[0] == 200
        assert ask(server, "/translate", GOOD, {"X-API-Key": "a key of many"})[0] == 200
        client = LibreTranslateAPI(f"http://{LOCAL}:{server.port}", "a key of many")
        assert isinstance(client.translate("a", "en", "de"), str)
        with pytest.raises(urllib.error.HTTPError, match="501"):  # it has no detector
            client.detect("a")
        assert ask(server, "/frontend/settings")[2]["keyRequired"] is True


def test_without_keys_the_token_is_the_key(service):
    with serving(service, Settings(port=0)) as server:
        status, _, answer = ask(server, "/translate", GOOD)
        assert (status, "the token in the address of the page" in answer["error"]) == (403, True)
        assert ask(server, "/translate", {**GOOD, "api_key": server.token})[0] == 200


def test_metrics_health_and_documents(server):
    ask(server, "/translate", {**GOOD, "q": sentence(4)})
    ask(server, "/translate", {})
    _, _, text = ask(server, "/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["gshard_requests_total", "/translate", "200"] >= 1
    assert samples["gshard_requests_total", "/translate", "400"] >= 1
    assert samples["gshard_texts_total", "everyone"] >= 1
    assert samples["gshard_ready",] == 0
    assert ask(server, "/ready")[0] == 503
    assert ask(server, "/frontend/settings")[2]["charLimit"] == 1000
    described = ask(server, "/openapi.json")[2]
    validate(described)
    assert "/translate/stream" in described["paths"]
    _, headers, page = ask(server, "/docs")
    assert all(path in page for path in described["paths"])
    assert all(missing in page for missing in openapi.MISSING)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)  # it may run
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert digest in headers["Content-Security-Policy"]


@pytest.mark.slow
def test_ready_when_the_programs_are_compiled(translator):
    service = Service(translator)
    with serving(service, OPEN) as server:
        service.warm_up()
        until(lambda: ask(server, "/ready")[0] == 200)


def test_the_bare_address_leads_to_the_page_only_where_no_key_is_asked_for(service):
    with serving(service, OPEN) as server:
        reply = urllib.request.urlopen(f"http://{LOCAL}:{server.port}", timeout=60)
        assert reply.url == server.address
        assert '<a href="/docs">the API</a>' in reply.read().decode()
        reply.close()
    with serving(service, Settings(port=0)) as server:
        assert ask(server, "/")[0] == 404


def test_logs_have_no_text(service, capfd):
    with serving(service, Settings(port=0, is_open=True, logs="json")) as server:
        ask(server, "/translate", {**GOOD, "q": "a private matter"})
        ask(server, "/nowhere/private")
    logging.getLogger("gshard.serve").handlers.clear()
    said = capfd.readouterr().err
    first, second = map(json.loads, said.splitlines())
    assert (first["event"], first["route"], first["status"]) == ("request", "/translate", 200)
    assert (first["key"], first["texts"], first["characters"]) == ("everyone", 1, 16)
    assert (second["route"], second["status"]) == ("other", 404)
    assert "private" not in said


def test_answers_are_finished_when_it_is_stopped(tokenizer):
    slow = Slow(echo(tokenizer))
    found = []
    with serving(Service(slow), OPEN) as server:
        client = threading.Thread(target=lambda: found.append(ask(server, "/translate", GOOD)))
        client.start()
        until(lambda: slow.batches)
        server.stop()
        slow.on.release()
        client.join()
    assert found[0][0] == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(service, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    settings = Settings(port=0, is_open=True, tls_cert=cert, tls_key=key)
    with serving(service, settings) as server:
        assert server.address.startswith("https://")
        trusted = ssl.create_default_context(cafile=cert)
        address = f"https://{LOCAL}:{server.port}/health"
        with urllib.request.urlopen(address, context=trusted, timeout=60) as reply:
            assert reply.status == 200
    with pytest.raises(UserError, match="belong together"):
        Settings(tls_cert=cert)
    locked = tmp_path / "locked.pem"
    locking = ["openssl", "pkey", "-in", key, "-out", locked, "-aes256", "-passout", "pass:secret"]
    subprocess.run(locking, check=True, capture_output=True)
    for certificate, its_key in ((key, cert), (cert, locked)):  # nobody is asked for a password
        with pytest.raises(UserError, match="are not a certificate and a key in PEM"):
            Settings(tls_cert=certificate, tls_key=its_key)


def test_behind_a_proxy_any_name_is_answered(service):
    with serving(service, OPEN) as server:
        assert ask(server, "/health", headers={"Host": "example.org"})[0] == 403
    settings = Settings(port=0, is_open=True, proxies=LOCAL, cors="https://example.org")
    with serving(service, settings) as server:
        headers = {"Host": "example.org", "Origin": "https://example.org"}
        status, sent, _ = ask(server, "/health", headers=headers)
        assert (status, sent["Access-Control-Allow-Origin"]) == (200, "https://example.org")
