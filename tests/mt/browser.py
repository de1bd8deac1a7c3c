"""Chromium without a window: open a page as a user would, click in it, and say what is there."""

import contextlib
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
    --disable-background-networking --disable-component-update --disable-sync
    --enable-logging=stderr --virtual-time-budget=3000
"""
_ERRORS = """
<script>
  window.errors = [];
  window.addEventListener("error", (event) => errors.push(String(event.message)));
  window.addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
</script>
"""
_HELPERS = """
<script>
  const all = (selector) => [...document.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  const press = (box, text) =>
    all(`${box} button`).find((button) => button.textContent === text).click();
  const point = (target, x, y) => {
    const frame = target.getBoundingClientRect();
    target.dispatchEvent(new PointerEvent("pointermove",
      { bubbles: true, clientX: frame.left + x, clientY: frame.top + y }));
    return one("#tip").hidden ? "" : one("#tip").innerText;
  };
  const type = (selector, text, kind) => {
    one(selector).value = text;
    one(selector).dispatchEvent(new Event(kind || "input", { bubbles: true }));
  };
</script>
"""


def _browser():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return program


def open_page(path, folder, size=(1200, 1000)):
    """The document at a path or address as the browser has it in the end, and its console."""
    address = path if str(path).startswith("http") else Path(path).as_uri()
    command = [_browser(), *FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={size[0]},{size[1]}", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, timeout=100, check=True)
    log = done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8"), [line for line in log.splitlines() if "CONSOLE" in line]


def act(path, folder, script, width=None):
    """What `script`, the body of a function, returns in a copy of the page; and all errors.

    The copy has no policy against other scripts. With a `width` it is shown in a frame so wide.
    """
    text = Path(path).read_text(encoding="utf-8")
    text, found = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', _ERRORS, text)
    assert found == 1
    send = "parent.postMessage({ result, errors }, '*')"
    call = f"<script>{{ const result = (() => {{ {script} }})(); {send}; }}</script>"
    copy = folder / "copy.html"
    copy.write_text(text.replace("</body>", f"{_HELPERS}{call}</body>"), encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(
        f"""<!DOCTYPE html><body><pre id="result"></pre><script>
        window.addEventListener("message", (event) => {{
          document.getElementById("result").textContent = JSON.stringify(event.data); }});
        </script><iframe src="copy.html" style="border:0;width:{width or 1200}px;height:9000px">
        </iframe></body>""",
        encoding="utf-8",
    )
    document, _ = open_page(frame, folder)
    said = re.search(r'<pre id="result">(.*?)</pre>', document, re.DOTALL)
    assert said, "the page never answered"
    assert said[1], "the page never answered"
    answer = json.loads(html.unescape(said[1]))
    assert answer["errors"] == []
    return answer["result"]


class Tab:
    """A page in a browser that is driven by DevTools' protocol: real clicks, any script."""

    def __init__(self, wire, answers):
        self._wire, self._answers, self._sent, self.said = wire, answers, 0, []
        self._session, self._is_loaded = {}, False
        (page,) = (t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        asked = {"targetId": page["targetId"], "flatten": True}
        self._session = {"sessionId": self._ask("Target.attachToTarget", **asked)["sessionId"]}
        self._ask("Log.enable")
        self._ask("Page.enable")

    def open(self, address):
        """Go there, and wait until all is loaded."""
        self._is_loaded = False
        self._ask("Page.navigate", url=address)
        while not self._is_loaded:
            self._heard()

    def _ask(self, method, **given):
        self._sent += 1
        asked = {"id": self._sent, "method": method, "params": given, **self._session}
        self._wire.write(json.dumps(asked).encode() + b"\0")
        while (heard := self._heard()).get("id") != self._sent:
            pass
        assert "error" not in heard, heard
        return heard["result"]

    def _heard(self):
        text = b""
        while (byte := self._answers.read(1)) not in (b"\0", b""):
            text += byte
        heard = json.loads(text)
        self._is_loaded |= heard.get("method") == "Page.loadEventFired"
        if heard.get("method") == "Log.entryAdded":
            self.said.append(heard["params"]["entry"]["text"])
        return heard

    def result(self, script):
        """What an expression is; of a promise, what it resolves to."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True}
        found = self._ask("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script):
        """The value of an expression, as soon as it is neither false nor empty."""
        wait = f"new Promise(done => {{ const look = () => {{ const found = {script}; "
        return self.result(f"{wait} found ? done(found) : setTimeout(look, 20) }}; look(); }})")

    def click(self, selector):
        """Press the mouse where the element is."""
        where = self.result(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); "
            "one.scrollIntoView(); const at = one.getBoundingClientRect(); "
            "return {x: at.x + at.width / 2, y: at.y + at.height / 2} })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            given = {"type": kind, "button": "left", "clickCount": 1, **where}
            self._ask("Input.dispatchMouseEvent", **given)


@contextlib.contextmanager
def driven(address, folder):
    """A `Tab` with the page at an address."""
    (here, send), (hear, there) = os.pipe(), os.pipe()
    flags = [flag for flag in FLAGS.split() if "virtual-time" not in flag]
    command = [_browser(), *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    command[1:1] = ["--remote-debugging-pipe"]
    shell = ["bash", "-c", f'exec "$@" 3<&{here} 4>&{there}', "bash"]
    browser = subprocess.Popen(
        [*shell, *command], pass_fds=(here, there), stderr=subprocess.DEVNULL
    )
    os.close(here)
    os.close(there)
    with browser, os.fdopen(send, "wb", 0) as wire, os.fdopen(hear, "rb") as answers:
        try:
            tab = Tab(wire, answers)
            tab.open(address)
            yield tab
        finally:
            browser.terminate()
