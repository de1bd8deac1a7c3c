"""The routes in OpenAPI's terms, and as a page to read."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

import gshard
from gshard.mt.serving.requests import DETECT, LANGUAGES, STREAM, TRANSLATE, Field

_ERROR = {"$ref": "#/components/schemas/Error"}
_STRING = {"type": "string"}
_MANY = {"type": "array", "items": _STRING}


def document(title: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    translation = {"$ref": "#/components/schemas/Translation"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{title}: translation by gshard",
            "version": gshard.__version__,
            "description": "LibreTranslate's routes, and server-sent events.",
        },
        "paths": {
            "/translate": {"post": _post("Translate text or HTML", TRANSLATE, translation)},
            "/translate/stream": {
                "get": {
                    **_get("Translate; each sentence is an event when it is done", _STRING, STREAM),
                    "responses": {
                        "200": {
                            "description": "Events: sentence, then done or error",
                            "content": {"text/event-stream": {"schema": _STRING}},
                        },
                        "default": _failure(),
                    },
                }
            },
            "/languages": {"get": _get("All languages", {"type": "array"}, LANGUAGES)},
            "/detect": {"post": _post("The language of a text", DETECT, {"type": "array"})},
            "/frontend/settings": {"get": _get("Limits and defaults", {"type": "object"})},
            "/health": {"get": _get("What the server does", {"type": "object"})},
            "/ready": {"get": _get("200 if it is ready, 503 if not", {"type": "object"})},
            "/metrics": {"get": _get("Prometheus' metrics", _STRING, (), "text/plain")},
        },
        "components": {"schemas": _schemas()},
    }


def page(title: str) -> str:
    """The same for people: one file without anything from outside."""
    source = resources.files("gshard.mt.serving").joinpath("docs.html").read_text("utf-8")
    template = jinja2.Environment(autoescape=True).from_string(source)
    return template.render(document=document(title))


def _schemas() -> dict[str, Any]:
    detected = {
        "type": "object",
        "properties": {"language": _STRING, "confidence": {"type": "number"}},
    }
    return {
        "Error": {
            "type": "object",
            "properties": {"error": _STRING},
            "required": ["error"],
        },
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


def _post(summary: str, fields: tuple[Field, ...], answer: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {field.name: field.schema for field in fields},
        "required": [field.name for field in fields if field.default is None],
        "additionalProperties": False,
    }
    kinds = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}},
        "responses": {"200": _success(answer), "default": _failure()},
    }


def _get(
    summary: str,
    answer: dict[str, Any],
    fields: tuple[Field, ...] = (),
    kind: str = "application/json",
) -> dict[str, Any]:
    parameters = [
        {
            "name": field.name, "in": "query", "required": field.default is None,
            "schema": field.schema,
        }
        for field in fields
    ]  # fmt: skip
    return {
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": _success(answer, kind), "default": _failure()},
    }


def _success(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"description": "The answer", "content": {kind: {"schema": schema}}}


def _failure() -> dict[str, Any]:
    return {
        "description": "What is wrong, and what is allowed",
        "content": {"application/json": {"schema": _ERROR}},
    }
