"""Files that are sent to be translated and fetched again, and the API's page in a browser."""

import json
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from gshard.mt.serving import api
from gshard.mt.serving.documents import SUFFIXES
from gshard.mt.serving.service import Service
from gshard.mt.serving.settings import LOCAL
from tests.mt.browser import driven
from tests.mt.serving.slow_translator import echo
from tests.mt.serving.test_api import OPEN, ask, serving
from tests.mt.serving.test_files import archive, unpacked


@pytest.fixture(scope="module")
def service(tokenizer):
    return Service(echo(tokenizer))


@pytest.fixture(scope="module")
def server(service):
    with serving(service, OPEN) as server:
        yield server


def send_file(server, name, data, **given):
    """What `curl -F file=@NAME` sends."""
    parts = b"".join(
        b'--part\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % part
        for part in (
            (b"file", b'; filename="%s"' % name.encode(), data),
            *((n.encode(), b"", v.encode()) for n, v in given.items()),
        )
    )
    request = urllib.request.Request(
        f"http://{LOCAL}:{server.port}/translate_file",
        parts + b"--part--\r\n",
        {"Content-Type": "multipart/form-data; boundary=part"},
    )
    try:
        with urllib.request.urlopen(request, timeout=240) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_files(server):
    cue = "1\n00:00:01,000 --> 00:00:02,500\n{}\n\n2\n00:00:03 --> 00:00:04\n...\n"
    for name, text in (("A.TXT", "{}\n\n!\n"), ("a.html", "<p>{}</p>"), ("a.srt", cue)):
        sent = text.format("one two").encode()
        status, answer = send_file(server, name, sent, source="en", target="de")
        assert (status, list(answer)) == (200, ["translatedFileUrl"])
        with urllib.request.urlopen(answer["translatedFileUrl"], timeout=60) as reply:
            assert reply.read().decode() == text.format("ONE TWO")
            assert "attachment" in reply.headers["Content-Disposition"]
    book = archive(".epub", "<p>One &amp; two</p>")
    url = send_file(server, "a.epub", book, source="auto", target="de")[1]["translatedFileUrl"]
    with urllib.request.urlopen(url, timeout=60) as reply:
        assert b"<p>ONE &amp; TWO</p>" in unpacked(reply.read())["OEBPS/ch1.xhtml"]
        assert reply.headers["Content-Type"] == "application/zip"
    assert ask(server, "/frontend/settings")[2]["supportedFilesFormat"] == list(SUFFIXES)
    assert server.access.files.stat().st_mode & 0o777 == 0o700
    for name in ("../api.py", "..%2Fapi.py", "a.txt", "A" * 22 + ".txt"):
        assert ask(server, f"/download_file/{name}")[0] == 404


@pytest.mark.parametrize(
    ("name", "data", "given", "message"),
    [
        ("a.pdf", b"a", {}, "ends with '.pdf'; allowed are .htm, .html, .srt, .txt, .docx"),
        ("a.txt", b"\xff", {}, "the file is no UTF-8"),
        ("a.docx", b"a", {}, "the file is no .docx: File is not a zip file"),
        ("a.txt", b"a" * 1001, {}, "1,000 are allowed"),
        ("a.txt", b"a", {"target": "xx"}, "does not translate into 'xx'"),
    ],
)
def test_files_that_are_refused(server, name, data, given, message):
    status, answer = send_file(server, name, data, **{"source": "en", "target": "de", **given})
    assert (status in (400, 413), message in answer["error"]) == (True, True)


def test_translated_files_are_removed(service, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with serving(service, OPEN) as server:
        first = send_file(server, "a.txt", b"a", source="en", target="de")[1]["translatedFileUrl"]
        now[0] = 3601.0
        second = send_file(server, "a.txt", b"a", source="en", target="de")[1]["translatedFileUrl"]
        kept = {path.name for path in server.access.files.iterdir()}
        assert kept == {second.rpartition("/")[2]} != {first.rpartition("/")[2]}
    assert not server.access.files.exists()


def test_a_browser_sends_requests_from_the_page_of_the_api(server, tmp_path):
    """With a click of the mouse: it shows the answer that a program gets, and a command line."""
    with driven(f"http://{LOCAL}:{server.port}/docs", tmp_path) as tab:
        form = 'form[data-path="/translate"]'
        one = f"document.querySelector('{form} "
        tab.result(f"{one}[name=q]').value = 'one two'")
        tab.result(f"{one}[name=source]').value = 'auto'")
        tab.result(f"{one}[name=target]').value = 'de'")
        tab.click(f"{form} button")
        said = tab.until(f"{one}[data-answer]').textContent.match(/^[0-9]+ [^]*}}/)?.[0]")
        status, _, answer = said.partition("\n")
        assert status == "200 OK"
        assert json.loads(answer)["translatedText"] == "ONE TWO"
        assert "curl" in tab.result(f"{one}[data-command]').textContent")
        assert tab.said == []
