"""LibreTranslate's requests: bodies within limits of size and time, and their fields.

One table of fields is for reading them, for errors about them, and for OpenAPI's document and page
(`openapi.py`). Clients may leave while they wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from gshard.errors import nearest
from gshard.mt.decoding.texts import well_formed
from gshard.mt.serving import documents
from gshard.mt.serving.service import RefusedError

T = TypeVar("T")
_READING = 20.0  # seconds that a request may take to arrive
JSON = "application/json"
_MULTIPART = "multipart/form-data"
_FORMS = ("application/x-www-form-urlencoded", _MULTIPART)
_PARTS = 1_000  # of a form


class File(NamedTuple):
    """A file of a form: how its name ends, and its bytes."""

    suffix: str
    data: bytes


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


async def read_object(
    request: Request, most: int, allowed: tuple[str, ...] = (JSON, *_FORMS)
) -> dict[str, Any]:
    """The fields that were sent, as JSON or as a form; a text that comes twice is a list."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in allowed:
        known = ", ".join(allowed)
        raise RefusedError(415, f"the request is {kind or 'of no type'}; allowed are {known}")
    body = await _body(request, most)
    if kind in _FORMS:
        return await _form(request, body)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is no JSON: {error}") from None
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


async def _form(request: Request, body: bytes) -> dict[str, Any]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    found: dict[str, Any] = {}
    try:
        reading = Request(request.scope, receive).form(max_files=1, max_fields=_PARTS)
        async with reading as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    suffix = PurePath(value.filename or "").suffix.lower()
                    found[name] = File(suffix, await value.read())
                else:
                    found[name] = value if name not in found else [*_listed(found[name]), value]
    except (HTTPException, MultiPartException, ValueError) as error:
        detail = getattr(error, "detail", None) or getattr(error, "message", None) or error
        raise RefusedError(400, f"the request is no form: {detail}") from None
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Field:
    """One field: its type in JSON Schema, what it means, and the values that it may have."""

    name: str
    kind: str  # string, integer, file, or texts: a string or a list of strings
    text: str
    default: Any = None  # without one, the field is required
    values: tuple[str, ...] = ()  # of a file: suffixes of its name

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        string = {"type": "string"}
        if self.kind == "file":
            return {**string, "format": "binary", "description": self.text}
        if self.kind == "texts":
            return {"oneOf": [string, {"type": "array", "items": string}], "description": self.text}
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
        if (self.kind == "file") != isinstance(given, File):
            what = f"a file of {_MULTIPART}" if self.kind == "file" else "text and no file"
            raise RefusedError(400, f"`{self.name}` is {what}")
        if isinstance(given, File):
            if given.suffix not in self.values:
                what = f"the file's name ends with {given.suffix[:20]!r}"
                raise RefusedError(400, f"{what}; allowed are {', '.join(self.values)}")
            return given
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
FILE = (
    Field("file", "file", ", ".join(documents.SUFFIXES), None, documents.SUFFIXES),
    *TRANSLATE[1:3],
    API_KEY,
)
DETECT = (Q_ONE, API_KEY)
PAGE = (  # what the server's own page sends
    Field("text", "string", "the text"),
    Field("target", "string", "the language to translate into", ""),
    Field("source", "string", "the language of the text", ""),
)
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
