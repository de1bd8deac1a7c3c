"""What the server's routes are, as OpenAPI 3.1 and as a page to read and to try them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

import gshard
from gshard.mt.serving.requests import (
    DETECT,
    FILE,
    LANGUAGES,
    STREAM,
    TRANSLATE,
    Field,
)
from gshard.mt.serving.service import About
from gshard.pages.template import style

MISSING = (  # of LibreTranslate's API
    "POST /suggest (corrections by users are not stored)",
    "files of .pdf in /translate_file",
)

_ERROR = {"$ref": "#/components/schemas/Error"}
_STRING = {"type": "string"}
_MANY = {"type": "array", "items": _STRING}
NAME = Field("name", "string", "as in translatedFileUrl")


def document(about: About) -> dict[str, Any]:
    """OpenAPI 3.1, with examples in languages of this model."""
    source = next((s for s in about.sources if s != about.target), about.target)
    examples = {"q": "Ready.", "source": source, "target": about.target}
    translation = {"$ref": "#/components/schemas/Translation"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{about.name}: translation by gshard",
            "version": gshard.__version__,
            "description": "LibreTranslate's routes, and server-sent events. Not supported: "
            f"{'; '.join(MISSING)}.",
        },
        "paths": {
            "/translate": {
                "post": _post("Translate text or HTML", TRANSLATE, translation, examples)
            },
            "/translate/stream": {
                "get": _get(
                    "Translate; each sentence is an event when it is done",
                    _STRING,
                    STREAM,
                    "text/event-stream",
                    examples,
                )
            },
            "/translate_file": {
                "post": _post("Translate a file", FILE, _object("translatedFileUrl"), examples)
            },
            "/download_file/{name}": {
                "get": _get("A translated file, for an hour", _STRING, (NAME,), "*/*")
            },
            "/languages": {"get": _get("All languages", {"type": "array"}, LANGUAGES)},
            "/detect": {
                "post": _post("The language of a text", DETECT, {"type": "array"}, examples)
            },
            "/frontend/settings": {"get": _get("Limits and defaults", {"type": "object"})},
            "/health": {"get": _get("What the server does", {"type": "object"})},
            "/ready": {"get": _get("200 if it is ready, 503 if not", {"type": "object"})},
            "/metrics": {"get": _get("Prometheus' metrics", _STRING, (), "text/plain")},
        },
        "components": {"schemas": _schemas()},
    }


def page(about: About) -> str:
    """The same for people, who can send requests from it: one file."""
    here = Path(__file__).parent
    made = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = made.from_string((here / "docs.html").read_text("utf-8"))
    styles = style(here, "tokens.css", "page.css")
    return template.render(document=document(about), styles=styles).lstrip()


def _schemas() -> dict[str, Any]:
    detected = {
        "type": "object",
        "properties": {"language": _STRING, "confidence": {"type": "number"}},
    }
    return {
        "Error": _object("error"),
        "Translation": {
            "type": "object",
            "description": "For a list of texts, every value is a list.",
            "properties": {
                "translatedText": {"oneOf": [_STRING, _MANY]},
                "alternatives": {"type": "array"},
                "detectedLanguage": {"oneOf": [detected, {"type": "array", "items": detected}]},
            },
            "required": ["translatedText"],
        },
    }


def _object(field: str) -> dict[str, Any]:
    return {"type": "object", "properties": {field: _STRING}, "required": [field]}


def _post(
    summary: str, fields: tuple[Field, ...], answer: dict[str, Any], examples: dict[str, str]
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {field.name: _shown(field, examples) for field in fields},
        "required": [field.name for field in fields if field.default is None],
        "additionalProperties": False,
    }
    kinds = ["application/json", "application/x-www-form-urlencoded", "multipart/form-data"]
    if any(field.kind == "file" for field in fields):
        kinds = kinds[2:]
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}},
        "responses": _responses(answer, "application/json"),
    }


def _get(
    summary: str,
    answer: dict[str, Any],
    fields: tuple[Field, ...] = (),
    kind: str = "application/json",
    examples: dict[str, str] | None = None,
) -> dict[str, Any]:
    parameters = [
        {
            "name": field.name, "in": "path" if field is NAME else "query",
            "required": field.default is None, "schema": _shown(field, examples or {}),
        }
        for field in fields
    ]  # fmt: skip
    return {"summary": summary, "parameters": parameters, "responses": _responses(answer, kind)}


def _shown(field: Field, examples: dict[str, str]) -> dict[str, Any]:
    """The schema of a field, with its example if there is one."""
    return {
        **field.schema,
        **({"examples": [examples[field.name]]} if field.name in examples else {}),
    }


def _responses(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        "200": {"description": "The answer", "content": {kind: {"schema": schema}}},
        "default": {
            "description": "What is wrong, and what is allowed",
            "content": {"application/json": {"schema": _ERROR}},
        },
    }
