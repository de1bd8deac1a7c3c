"""LibreTranslate's requests: bodies within limits of size and time, their fields, and OpenAPI.

One table of fields is for reading them, for errors about them, and for OpenAPI's document and page.
Clients may leave while they wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import jinja2
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

import gshard
from gshard.mt.decoding.texts import well_formed
from gshard.mt.errors import nearest
from gshard.mt.serving.service import RefusedError

T = TypeVar("T")
_READING = 20.0  # seconds that a request may take to arrive
_JSON = "application/json"
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_PARTS = 1_000  # of a form


async def answered(request: Request, answer: Future[T]) -> T:
    """The answer to a request whose body was read; it is cancelled if the client leaves."""
    waiting, leaving = asyncio.wrap_future(answer), asyncio.ensure_future(_left(request))
    either: list[asyncio.Future[Any]] = [waiting, leaving]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        waiting.cancel()  # nobody waits for it any more


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def kind_of(request: Request) -> str:
    """The type of the body, as its sender says."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, most: int) -> Any:
    """The JSON that was sent. It must say that it is: no form on another site can."""
    kind = kind_of(request)
    if kind != _JSON:
        raise RefusedError(415, f"the request is {kind or 'of no type'}, not {_JSON}")
    return _parsed(await _body(request, most))


async def read_object(request: Request, most: int) -> dict[str, Any]:
    """The fields that were sent, as JSON or as a form; a field that comes twice is a list."""
    kind = kind_of(request)
    if kind in _FORMS:
        return await _form(request, await _body(request, most))
    if kind != _JSON:
        allowed = ", ".join((_JSON, *_FORMS))
        raise RefusedError(415, f"the request is {kind or 'of no type'}; allowed are {allowed}")
    found = _parsed(await _body(request, most))
    if not isinstance(found, dict):
        raise RefusedError(400, 'the request is no JSON object such as {"q": "..."}')
    return found


async def _body(request: Request, most: int) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(_READING):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise RefusedError(413, f"a request has {most:,} bytes at most")
    except TimeoutError:
        raise RefusedError(408, "the request did not arrive in time") from None
    return body


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is no JSON: {error}") from None


async def _form(request: Request, body: bytes) -> dict[str, Any]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        form = await Request(request.scope, receive).form(max_files=0, max_fields=_PARTS)
    except (HTTPException, MultiPartException, ValueError) as error:
        detail = getattr(error, "detail", None) or getattr(error, "message", None) or error
        raise RefusedError(400, f"the request is no form: {detail}") from None
    found: dict[str, Any] = {}
    for name, value in form.multi_items():
        if not isinstance(value, str):
            raise RefusedError(400, f"`{name[:40]}` is a file; only text is taken")
        found[name] = value if name not in found else [*_listed(found[name]), value]
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Field:
    """One field: its type in JSON Schema, what it means, and the values that it may have."""

    name: str
    kind: str  # string, integer, or texts: a string or a list of strings
    text: str
    default: Any = None  # without one, the field is required
    values: tuple[str, ...] = ()

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        string = {"type": "string"}
        if self.kind == "texts":
            return {
                "oneOf": [string, {"type": "array", "items": string}],
                "description": self.text,
            }
        found: dict[str, Any] = {"type": self.kind, "description": self.text}
        if self.values:
            found["enum"] = list(self.values)
        if self.default not in (None, ""):
            found["default"] = self.default
        return found

    def read(self, given: Any) -> Any:
        """The value; an error that says what is allowed if it is none.

        Halves of surrogate pairs, which JSON can spell, are replaced: no answer could have them.
        """
        if self.kind == "texts":
            if isinstance(given, list) and all(isinstance(text, str) for text in given):
                return [well_formed(text) for text in given]
            if not isinstance(given, str):
                raise RefusedError(400, f"`{self.name}` is a string or a list of strings")
            return well_formed(given)
        if self.kind == "integer":
            return self._integer(given)
        if not isinstance(given, str):
            raise RefusedError(400, f"`{self.name}` is a string")
        if self.values and given not in self.values:
            raise RefusedError(
                400,
                f"`{self.name}` is {given[:40]!r}{nearest(given, self.values)}; allowed are "
                f"{', '.join(self.values)}",
            )
        return well_formed(given)

    def _integer(self, given: Any) -> int:
        """Forms have digits."""
        if isinstance(given, str) and given.isdecimal():
            given = int(given[:9])
        if type(given) is not int or given < 0:
            raise RefusedError(400, f"`{self.name}` is an integer of at least 0")
        return given


API_KEY = Field("api_key", "string", "the key, if the server asks for one", "")
Q_ONE = Field("q", "string", "the text")
TRANSLATE = (
    Field("q", "texts", "the text, or several"),
    Field("source", "string", "the language of the text, or auto"),
    Field("target", "string", "the language to translate into"),
    Field("format", "string", "text, or HTML whose markup is kept", "text", ("text", "html")),
    Field("alternatives", "integer", "how many other translations to give", 0),
    API_KEY,
)
STREAM = (Q_ONE, *TRANSLATE[1:])
DETECT = (Q_ONE, API_KEY)
LANGUAGES = (API_KEY,)


def read(fields: tuple[Field, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all fields; a field that is unknown or missing is an error that names all."""
    known = [field.name for field in fields]
    for name in given:
        if name not in known:
            raise RefusedError(
                400,
                f"unknown field {name[:40]!r}{nearest(name, known)}; allowed are "
                f"{', '.join(known)}",
            )
    found = {}
    for field in fields:
        if field.name in given:
            found[field.name] = field.read(given[field.name])
        elif field.default is None:
            raise RefusedError(
                400, f"`{field.name}` ({field.text}) is missing; the fields are {', '.join(known)}"
            )
        else:
            found[field.name] = field.default
    return found


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
