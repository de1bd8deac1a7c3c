"""What the server's routes are, as OpenAPI 3.1 and as a page to read and to try them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jinja2

import gshard
from gshard.mt.serving.requests import DETECT, FILE, LANGUAGES, STREAM, TRANSLATE, Field
from gshard.mt.serving.service import About
from gshard.pages.template import style

MISSING = (  # of LibreTranslate's API
    "POST /suggest (corrections by users are not stored)",
    "files of .pdf in /translate_file",
)

_STRING, _OBJECT, _ARRAY = {"type": "string"}, {"type": "object"}, {"type": "array"}
_JSON = "application/json"
_KINDS = (_JSON, "application/x-www-form-urlencoded", "multipart/form-data")
NAME = Field("name", "string", "as in translatedFileUrl")


def _object(field: str) -> dict[str, Any]:
    return {"type": "object", "properties": {field: _STRING}, "required": [field]}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_DETECTED = {**_OBJECT, "properties": {"language": _STRING, "confidence": {"type": "number"}}}
_SCHEMAS = {
    "Error": _object("error"),
    "Translation": {
        "type": "object",
        "description": "For a list of texts, every value is a list.",
        "properties": {
            "translatedText": {"oneOf": [_STRING, _array(_STRING)]},
            "alternatives": _ARRAY,
            "detectedLanguage": {"oneOf": [_DETECTED, _array(_DETECTED)]},
        },
        "required": ["translatedText"],
    },
}


class _Route(NamedTuple):
    """What a route does, its fields, and its answer: a schema, and a type of the body."""

    method: str
    path: str
    summary: str
    fields: tuple[Field, ...] = ()
    answer: dict[str, Any] = _OBJECT
    kind: str = _JSON


_STREAMED = "Translate; each sentence is an event when it is done"
_TRANSLATION = {"$ref": "#/components/schemas/Translation"}
_ROUTES = (
    _Route("post", "/translate", "Translate text or HTML", TRANSLATE, _TRANSLATION),
    _Route("get", "/translate/stream", _STREAMED, STREAM, _STRING, "text/event-stream"),
    _Route("post", "/translate_file", "Translate a file", FILE, _object("translatedFileUrl")),
    _Route(
        "get", "/download_file/{name}", "A translated file, for an hour", (NAME,), _STRING, "*/*"
    ),
    _Route("get", "/languages", "All languages", LANGUAGES, _ARRAY),
    _Route("post", "/detect", "The language of a text", DETECT, _ARRAY),
    _Route("get", "/frontend/settings", "Limits and defaults"),
    _Route("get", "/health", "What the server does"),
    _Route("get", "/ready", "200 if it is ready, 503 if not"),
    _Route("get", "/metrics", "Prometheus' metrics", (), _STRING, "text/plain"),
)


def document(about: About) -> dict[str, Any]:
    """OpenAPI 3.1, with examples in languages of this model."""
    source = next((s for s in about.sources if s != about.target), about.target)
    examples = {"q": "Ready.", "source": source, "target": about.target}
    info = {
        "title": f"{about.name}: translation by gshard",
        "version": gshard.__version__,
        "description": "LibreTranslate's routes, and server-sent events. Not supported: "
        f"{'; '.join(MISSING)}.",
    }
    paths = {route.path: {route.method: _operation(route, examples)} for route in _ROUTES}
    return {
        "openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": _SCHEMAS},
    }  # fmt: skip


def page(about: About) -> str:
    """The same for people, who can send requests from it: one file."""
    here = Path(__file__).parent
    made = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = made.from_string((here / "docs.html").read_text("utf-8"))
    styles = style(here, "tokens.css", "page.css")
    return template.render(document=document(about), styles=styles).lstrip()


def _operation(route: _Route, examples: dict[str, str]) -> dict[str, Any]:
    shown = {field.name: field.schema for field in route.fields}
    for name in shown.keys() & examples:
        shown[name] = {**shown[name], "examples": [examples[name]]}
    required = [field.name for field in route.fields if field.default is None]
    error = {"content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    responses = {
        "200": {"description": "The answer", "content": {route.kind: {"schema": route.answer}}},
        "default": {"description": "What is wrong, and what is allowed", **error},
    }
    found: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if route.method == "get":
        place = "path" if NAME in route.fields else "query"
        parameters = [
            {"name": name, "in": place, "required": name in required, "schema": schema}
            for name, schema in shown.items()
        ]
        return found | {"parameters": parameters}
    schema = {
        **_OBJECT, "properties": shown, "required": required, "additionalProperties": False,
    }  # fmt: skip
    kinds = _KINDS[2:] if any(field.kind == "file" for field in route.fields) else _KINDS
    content = {kind: {"schema": schema} for kind in kinds}
    return found | {"requestBody": {"required": True, "content": content}}
