"""Chromium without a window: open a page as a user would, click in it, and say what is there."""

import html
import json
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


def open_page(path, folder, size=(1200, 1000)):
    """The document at a path or address as the browser has it in the end, and its console."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    address = path if str(path).startswith("http") else Path(path).as_uri()
    command = [program, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]
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
