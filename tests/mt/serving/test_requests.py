"""Requests that no client should send: none is answered by an error of the server, or ends it."""

import contextlib
import functools
import http.client
import http.server
import json
import logging
import re
import socket
import threading

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gshard.mt.decoding.detect import Detector
from gshard.mt.serving import observing
from gshard.mt.serving.service import Service
from gshard.mt.serving.settings import LOCAL, Settings
from tests.mt.browser import open_page
from tests.mt.processes import PATIENCE
from tests.mt.serving.slow_translator import echo
from tests.mt.serving.test_api import GOOD, ask, serving

ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def service(tokenizer):
    return Service(echo(tokenizer))


@pytest.fixture(scope="module")
def server(service, corpus):
    detector = Detector.of(corpus, corpus.languages)
    open_to_all = Settings(port=0, is_open=True, characters=1000, texts=5, cors=ORIGIN)
    with serving(service, open_to_all, detector) as server:
        yield server


@pytest.mark.parametrize(
    ("q", "kind", "said"),
    [
        ("\ud83d", "text", "\ufffd"),
        ("one \ud83d two", "text", "ONE \ufffd TWO"),
        (["\ud83d", "\ude00 a"], "text", ["\ufffd", "\ufffd A"]),
        ("<p title='\ud83d'>a</p>", "html", "<p title='\ufffd'>A</p>"),
        ("<![x", "html", "<![x"),
        ("<![x]>a", "html", "<![x]>A"),
        ("&#99999999999;a", "html", "\ufffdA"),
    ],
)
def test_texts_that_no_encoding_can_write(server, q, kind, said):
    status, _, answer = ask(server, "/translate", {**GOOD, "q": q, "format": kind})
    assert (status, answer) == (200, {"translatedText": said})


ODD = st.text(
    st.characters(exclude_categories=()) | st.sampled_from("\0\ud83d\x1b<&\n"), max_size=30
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD | st.just(10**400),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(ODD, each, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["q", "source", "target", "format", "alternatives", "api_key", "text"])
FIELDS = st.dictionaries(
    NAMES | ODD, VALUES | st.sampled_from(["en", "de", "html", "text", "auto"]), max_size=5
)
GIVEN = st.builds(lambda more: {**GOOD, **more}, FIELDS) | FIELDS | VALUES
BODIES = (
    GIVEN.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=60)
    | st.sampled_from(
        [b"[" * 9000, b'{"q":' * 3000, b"9" * 9000, b'\xff\xfe"', b"q=%ED%A0%BD&q=%00"]
    )
)
KINDS = (
    "application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a",
    "multipart/form-data; boundary=", "multipart/form-data; boundary=a; charset=unicode_escape",
    "application/json; charset=utf-16", "text/html", "\xe9", "",
)  # fmt: skip
PATHS = (
    "/translate", "/detect", "/languages", "/frontend/settings", "/health", "/ready", "/metrics",
    "/docs", "/openapi.json", "/page/translate", "/page/model", "/page/", "/health/", "/", "//",
    "/%ED%A0%BD", "/%00", "/..%2f", "/translate/stream",
    "/translate/stream?source=en&target=de&q=%ED",
    "/translate/stream?q=%00&source=&target=", "/detect?q=%F0%9F", "*", "/\x7f",
)  # fmt: skip
JSON = {"Host": LOCAL, "Content-Type": "application/json"}
HOSTS = (
    "127.0.0.1",
    "[127.0.0.1",
    "[::1]",
    "localhost:x",
    "127.0.0.1:99999999",
    "::1",
    "127.0.0.1]",
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(PATHS),
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "BREW"]),
    body=BODIES,
    headers=st.fixed_dictionaries(
        {"Host": st.sampled_from(HOSTS), "Content-Type": st.sampled_from(KINDS)},
        optional={
            "Origin": st.sampled_from([ORIGIN, "null", "\xff"]),
            "Access-Control-Request-Method": st.sampled_from(["POST", "\xff"]),
            "Access-Control-Request-Headers": st.sampled_from(["a", "\x1b, \xff"]),
            "Accept": st.sampled_from(["text/event-stream", "\xff"]),
            "Authorization": st.sampled_from(["Bearer", "Bearer \xff", "\x1b"]),
            "X-Forwarded-For": st.sampled_from(["\x1b[2J", "a" * 9000]),
        },
    ),
    chunked=st.booleans(),
)
@example("/nowhere", "GET", b"", {"Host": "[127.0.0.1"}, False)
@example("/translate", "POST", json.dumps({**GOOD, "q": "\ud83d"}).encode(), JSON, True)
def test_no_request_is_an_error_of_the_server(server, path, method, body, headers, chunked):
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=PATIENCE)
    connection._validate_path = lambda url: None
    with contextlib.closing(connection):
        sent = iter([body]) if chunked else body
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is refused before
            connection.request(method, path, sent, headers, encode_chunked=chunked)
        try:
            with connection.getresponse() as reply:
                data = reply.read()
        except ConnectionResetError:  # refused, and closed before all of it was sent
            assert ask(server, "/health")[0] == 200
            return
    assert reply.status < 500 or (path, reply.status) == ("/ready", 503)
    if "json" in reply.getheader("Content-Type", "") and data:
        json.loads(data.decode("utf-8"))


HEAD = b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
BYTES = {
    "zeros": b"\0" * 100_000,
    "a long header": HEAD + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
    "many headers": HEAD + b"A: b\r\n" * 20_000 + b"\r\n",
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "no chunk": CHUNKED + b"\r\nzz\r\n",
    "small chunks": CHUNKED + b"\r\n" + b"1\r\n[\r\n" * 30_000 + b"0\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "two lengths": CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("sent", BYTES.values(), ids=BYTES)
def test_no_bytes_end_it(server, sent):
    with (
        socket.create_connection((LOCAL, server.port), timeout=PATIENCE) as wire,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        wire.sendall(sent)
        assert b" 500 " not in wire.recv(65_536).partition(b"\r\n")[0]
    assert ask(server, "/health")[0] == 200


def test_pages_of_the_origin_may_use_it(server):
    asked = {"Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    asked["Access-Control-Request-Private-Network"] = "true"
    status, sent, _ = ask(server, "/translate", None, {**asked, "Origin": ORIGIN}, "OPTIONS")
    assert (status, sent["Access-Control-Allow-Origin"]) == (200, ORIGIN)
    assert "POST" in sent["Access-Control-Allow-Methods"]
    assert "authorization" in sent["Access-Control-Allow-Headers"]
    assert sent["Access-Control-Allow-Private-Network"] == "true"
    for q, status in (("a", 200), (5, 400)):
        found = ask(server, "/translate", {**GOOD, "q": q}, {"Origin": ORIGIN})
        assert (found[0], found[1]["Access-Control-Allow-Origin"]) == (status, ORIGIN)
    other = {**asked, "Origin": "https://example.com"}
    status, sent, _ = ask(server, "/translate", None, other, "OPTIONS")
    assert (status, sent["Access-Control-Allow-Origin"]) == (400, None)


PAGE = """<!DOCTYPE html><body><pre></pre><script>
fetch("http://127.0.0.1:PORT/translate", {
  method: "POST",
  headers: { "Content-Type": "application/json", "X-API-Key": "" },
  body: JSON.stringify({ q: "hello", source: "en", target: "de" }),
}).then((reply) => reply.text(), String).then((text) => {
  document.querySelector("pre").textContent = text; });
</script></body>"""


def test_a_browser_lets_a_page_of_the_origin_use_it(service, tmp_path):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer((LOCAL, 0), handler) as pages:
        threading.Thread(target=pages.serve_forever).start()
        try:
            origin = f"http://{LOCAL}:{pages.server_port}"
            with serving(service, Settings(port=0, is_open=True, cors=origin)) as server:
                (tmp_path / "page.html").write_text(PAGE.replace("PORT", str(server.port)))
                document, _ = open_page(f"{origin}/page.html", tmp_path)
        finally:
            pages.shutdown()
    assert re.search("<pre>(.*)</pre>", document)[1] == '{"translatedText":"HELLO"}'


def test_errors_are_json_lines_too(service, capfd, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # and set back at the end
    with serving(service, Settings(port=0, is_open=True, logs="json")) as server:
        assert ask(server, "/translate", {**GOOD, "q": "fail"})[0] == 500
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        logging.getLogger("asyncio").error("of the loop")
    logging.captureWarnings(False)
    observing.start_logs("none")
    said = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    errors = [each for each in said if each["level"] == "error"]
    assert "the model is broken" in errors[0]["error"]
    assert "ZeroDivisionError" in errors[1]["error"]
    assert errors[2]["event"] == "of the loop"


def test_errors_are_shown_where_requests_are_not(service, capfd):
    with serving(service, Settings(port=0, is_open=True)) as server:
        assert ask(server, "/translate", {**GOOD, "q": "fail"})[0] == 500
        assert ask(server, "/translate", GOOD)[0] == 200
    said = capfd.readouterr().err
    assert said.count("RuntimeError: the model is broken") == 1
    assert " request " not in said
