"""Templates that escape what they are given, and the policy of a page that runs only its script."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
# What no text of a page or chart has: controls, halves of surrogate pairs, what is no character.
_UNWRITTEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_EXTRA = "pages and plots need more packages: pip install 'gshard[plots]'"


def render(folder: Path, name: str, scripts: tuple[str, ...] = (), **values: Any) -> str:
    """A template of `folder` filled in; it may extend those of this folder.

    `scripts` are files of either folder. They become the page's one script, the only one that its
    policy lets a browser run.
    """
    script = "\n".join(_found(folder, script) for script in scripts)
    script = f'"use strict";\n(() => {{\n{script}}})();'
    template = _environment(folder).get_template(name)
    return template.render(script=markup(script), policy=_policy(script), **values)


def checked(value: Any) -> Any:
    """JSON for a script element of a template: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for unsafe in "<>&\u2028\u2029":
        text = text.replace(unsafe, f"\\u{ord(unsafe):04x}")
    return markup(text)


def written(value: Any) -> Any:
    """`value`, of which JSON can be made, with U+FFFD in its texts for what cannot be written."""
    if isinstance(value, dict):
        return {name: written(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [written(each) for each in value]
    return _UNWRITTEN.sub("\ufffd", value) if type(value) is str else value


def style(folder: Path, *names: str) -> Any:
    """Style sheets, for a style element of a template."""
    return markup("\n".join(_found(folder, name) for name in names))


def _found(folder: Path, name: str) -> str:
    path = folder / name if (folder / name).exists() else _HERE / name
    return path.read_text(encoding="utf-8")


def _policy(script: str) -> str:
    checksum = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{checksum}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def markup(text: str) -> Any:
    """Text that is HTML already, which templates leave as it is."""
    return needed("markupsafe").Markup(text)


def needed(package: str) -> Any:
    """A package that pages are made with; an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(_EXTRA, name=error.name) from None


def have_pages() -> bool:
    """Whether the packages are installed that pages are made with."""
    return all(map(importlib.util.find_spec, ("jinja2", "vl_convert")))


@functools.cache
def _environment(folder: Path) -> Any:
    jinja2 = needed("jinja2")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _HERE]),
        autoescape=jinja2.select_autoescape(),  # HTML alone
        undefined=jinja2.StrictUndefined,
        finalize=written,
        trim_blocks=True,
        lstrip_blocks=True,
    )
