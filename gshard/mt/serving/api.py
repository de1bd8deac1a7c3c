"""LibreTranslate's routes, which its many clients already speak.

`POST /translate` takes JSON or a form, one text or several, plain or HTML. With `Accept:
text/event-stream`, and at `GET /translate/stream` for browsers' EventSource, each sentence is an
event as soon as it is translated.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import babel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gshard.errors import UserError
from gshard.mt.batching.tokenizer import Task
from gshard.mt.decoding.detect import Detector
from gshard.mt.decoding.texts import Hypothesis, choose_target
from gshard.mt.serving import documents, requests
from gshard.mt.serving.observing import Metrics, note
from gshard.mt.serving.service import PIECES, TOO_MUCH, RefusedError, Service, refuse_more
from gshard.mt.serving.settings import ApiKeys, Key, Settings

_AUTO = "auto"
_EVENTS = "text/event-stream"
_KEPT = 3600.0  # seconds that a translated file can be fetched,
_MOST_FILES = 1000  # unless so many are newer
_FILE = re.compile(r"[A-Za-z0-9_-]{22}\.[a-z]+")
_TOO_LONG = "characters are too many for one request"
_BEAT = 15.0  # seconds after which a stream says that it is alive: proxies end silent ones


@dataclass(frozen=True)
class Asked:
    """A request to translate, checked."""

    is_batch: bool
    documents: tuple[documents.Document, ...]
    source: str  # "" where the model does not have to know it
    target: str
    alternatives: int
    detected: tuple[dict[str, Any], ...] | None

    @property
    def sentences(self) -> list[str]:
        """The sentences of all texts, one after the other."""
        return [sentence for document in self.documents for sentence in document.sentences]

    def answer(self, found: Sequence[Sequence[Hypothesis]]) -> dict[str, Any]:
        """In LibreTranslate's form, from the n-best lists of the sentences."""
        left, versions = iter(found), []
        for document in self.documents:
            mine = [next(left) for _ in document.sentences]
            count = max((len(hypotheses) for hypotheses in mine), default=1)
            best = (
                [hypotheses[min(n, len(hypotheses) - 1)].text for hypotheses in mine]
                for n in range(max(1, min(self.alternatives + 1, count)))
            )
            versions.append([document.joined(texts, self.target) for texts in best])
        each: dict[str, list[Any]] = {"translatedText": [said for said, *_ in versions]}
        if self.alternatives:
            each["alternatives"] = [others for _, *others in versions]
        if self.detected is not None:
            each["detectedLanguage"] = list(self.detected)
        return each if self.is_batch else {name: values[0] for name, values in each.items()}


class Api:
    """The routes of one service."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        keys: ApiKeys,
        files: Path,
        detector: Detector | None = None,
    ):
        self._service, self._settings, self._keys = service, settings, keys
        self._files, self._detector = files, detector
        self._made: list[tuple[float, Path]] = []  # files, the oldest first
        self.metrics = Metrics(service)
        languages = always(lambda: JSONResponse(listed(service.translator.tokenizer.tasks)))
        self.routes = [
            Route("/translate", self._translate, methods=["POST"]),
            Route("/translate/stream", self._stream, methods=["GET"]),
            Route("/translate_file", self._translate_file, methods=["POST"]),
            Route("/download_file/{name}", self._download, name="download"),
            Route("/languages", languages),
            Route("/detect", self._detect, methods=["POST"]),
            Route("/frontend/settings", self._frontend),
            Route("/health", always(lambda: JSONResponse(service.health))),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
        ]

    async def _translate(self, request: Request) -> Response:
        given = await requests.read_object(request, 16 * self._settings.characters)
        asked = await self._asked(request, requests.read(requests.TRANSLATE, given))
        if _EVENTS in request.headers.get("Accept", ""):
            return self._events(asked)
        found = await requests.answered(request, self._submit(asked))
        return JSONResponse(asked.answer(found))

    async def _stream(self, request: Request) -> Response:
        given = requests.read(requests.STREAM, dict(request.query_params))
        return self._events(await self._asked(request, given))

    async def _translate_file(self, request: Request) -> Response:
        most = max(documents.LARGEST, 16 * self._settings.characters)
        given = requests.read(requests.FILE, await requests.read_object(request, most))
        self._key(request, given["api_key"])  # nothing is unpacked for others
        suffix, data = given.pop("file")
        try:
            file = await asyncio.to_thread(documents.opened, suffix, data)
        except ValueError as error:
            raise RefusedError(400, f"the file is {error}") from None
        question = {**given, "q": file.text, "format": file.kind, "alternatives": 0}
        asked = await self._asked(request, question)
        found = await requests.answered(request, self._submit(asked))
        name = f"{secrets.token_urlsafe(16)}{suffix}"
        text = asked.answer(found)["translatedText"]
        await asyncio.to_thread(self._keep, name, file.written, text)
        return JSONResponse({"translatedFileUrl": str(request.url_for("download", name=name))})

    def _keep(self, name: str, written: Callable[[str], bytes], text: str) -> None:
        """Write a translated file, and remove those whose time is over."""
        now, path = time.monotonic(), self._files / name
        self._files.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(written(text))
        self._made.append((now, path))
        while self._made[0][0] < now - _KEPT or len(self._made) > _MOST_FILES:
            self._made.pop(0)[1].unlink(missing_ok=True)

    async def _download(self, request: Request) -> Response:
        """Whoever knows the random name may have the file."""
        path = self._files / (name := request.path_params["name"])
        if not _FILE.fullmatch(name) or not path.is_file():
            raise RefusedError(
                404, "there is no such file, or not any more: it is kept for an hour"
            )
        headers = {"Content-Disposition": f'attachment; filename="translated{path.suffix}"'}
        kind = "text/plain; charset=utf-8" if path.suffix in documents.PLAIN else "application/zip"
        return Response(path.read_bytes(), headers=headers, media_type=kind)

    async def _asked(self, request: Request, given: dict[str, Any]) -> Asked:
        texts = given["q"] if isinstance(given["q"], list) else [given["q"]]
        characters = sum(map(len, texts))
        refuse_more(len(texts), self._settings.texts, "texts are too many")
        refuse_more(characters, self._settings.characters, _TOO_LONG)
        key = self._admit(request, given["api_key"], max(1, len(texts)))
        note(request.scope, key=key.name, texts=len(texts), characters=characters)
        target = self._target(given["source"], given["target"])
        note(request.scope, source=given["source"], target=target)
        return await asyncio.to_thread(self._prepared, given, texts, target)

    def _prepared(self, given: dict[str, Any], texts: list[str], target: str) -> Asked:
        """Cut the texts, which takes a moment if they are long."""
        read = documents.READERS[given["format"]]
        translator = self._service.translator
        cut = [read(text, translator.sentences) for text in texts]
        asked = Asked(
            isinstance(given["q"], list),
            tuple(cut),
            given["source"] if translator.tokenizer.needs_source else "",
            target,
            given["alternatives"],
            tuple(map(self._best, texts)) if given["source"] == _AUTO and self._detector else None,
        )
        most = max(PIECES, self._settings.characters // 10)
        refuse_more(len(asked.sentences), most, TOO_MUCH)
        return asked

    def _target(self, source: str, target: str) -> str:
        sources = self._service.about.sources
        if source not in (_AUTO, *sources):
            raise RefusedError(
                400,
                f"there is no translation from {source[:40]!r}; allowed are "
                f"{', '.join((_AUTO, *sources))}",
            )
        try:
            tokenizer = self._service.translator.tokenizer
            return choose_target(tokenizer, "" if source == _AUTO else source, target)
        except UserError as error:
            raise RefusedError(400, str(error)) from None

    def _admit(self, request: Request, given: str, texts: int) -> Key:
        """The key of a request, if it may be answered now."""
        key = self._key(request, given)
        if seconds := self._keys.wait(key, texts):
            raise RefusedError(
                429,
                f"{key.per_minute:,} texts per minute are allowed; try again in {seconds} s",
                retry_after=seconds,
            )
        return key

    def _key(self, request: Request, given: str) -> Key:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = given or (token.strip() if scheme.lower() == "bearer" else "")
        given = given or request.headers.get("X-API-Key", "")
        key = self._keys.find(given)
        if key is None:
            raise RefusedError(
                403,
                f"{'this server has no such api_key' if given else '`api_key` is missing'}: "
                f"{self._keys.hint}",
            )
        return key

    def _submit(self, asked: Asked, listener: Any = None) -> Future[list[list[Hypothesis]]]:
        return self._service.submit_pieces(asked.sentences, asked.target, listener, asked.source)

    def _events(self, asked: Asked) -> Response:
        """Each sentence, then the entire answer, as server-sent events."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        owners = [n for n, document in enumerate(asked.documents) for _ in document.sentences]

        def tell(event: str, **data: Any) -> None:
            loop.call_soon_threadsafe(heard.put_nowait, (event, data))

        def listener(n: int, hypotheses: list[Hypothesis]) -> None:
            of = {"text": owners[n], "sentence": n, "sentences": len(owners)}
            tell("sentence", **of, translatedText=hypotheses[0].text)

        answer = self._submit(asked, listener)

        def finish(done: Future[list[list[Hypothesis]]]) -> None:
            if done.cancelled():
                return
            if (error := done.exception()) is None:
                tell("done", **asked.answer(done.result()))
            else:
                known = isinstance(error, RefusedError)
                tell("error", error=str(error) if known else "something went wrong")

        answer.add_done_callback(finish)

        async def stream() -> AsyncIterator[str]:
            try:
                while True:
                    try:
                        event, data = await asyncio.wait_for(heard.get(), _BEAT)
                    except TimeoutError:
                        yield ": still here\n\n"
                        continue
                    yield f"event: {event}\ndata: {json.dumps(data)}\n\n"
                    if event != "sentence":
                        return
            finally:
                answer.cancel()  # the client may have left

        return StreamingResponse(stream(), media_type=_EVENTS, headers={"X-Accel-Buffering": "no"})

    def _best(self, text: str) -> dict[str, Any]:
        assert self._detector is not None
        found = self._detector.detect(text, 1)
        return found[0]._asdict() if found else {"language": "", "confidence": 0.0}

    async def _detect(self, request: Request) -> Response:
        given = await requests.read_object(request, 16 * self._settings.characters)
        asked = requests.read(requests.DETECT, given)
        refuse_more(len(asked["q"]), self._settings.characters, _TOO_LONG)
        key = self._admit(request, asked["api_key"], 1)
        note(request.scope, key=key.name)
        if self._detector is None:
            raise RefusedError(
                501,
                "this model has no detector of languages; a release that is made where the corpus "
                "is has one",
            )
        return JSONResponse([found._asdict() for found in self._detector.detect(asked["q"])])

    async def _frontend(self, request: Request) -> Response:
        target = self._service.about.target
        return JSONResponse(
            {
                "apiKeys": not self._keys.is_open,
                "charLimit": self._settings.characters,
                "filesTranslation": True,
                "frontendTimeout": 500,
                "keyRequired": not self._keys.is_open,
                "language": {
                    "source": {"code": _AUTO, "name": "Auto Detect"},
                    "target": {"code": target, "name": language_name(target)},
                },
                "suggestions": False,
                "supportedFilesFormat": list(documents.SUFFIXES),
            }
        )

    async def _ready(self, request: Request) -> Response:
        ready = self._service.health["status"] == "ready"
        return JSONResponse(self._service.health, 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4")


def always(answer: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers everyone alike."""

    async def answered(request: Request) -> Response:
        return answer()

    return answered


@functools.cache
def language_name(code: str) -> str:
    """The English name of a language, such as "Portuguese (Brazil)"; its code if it has none."""
    plain, _, script = code.partition("@")
    try:
        name = babel.Locale.parse(plain.replace("-", "_")).get_display_name("en")
    except (ValueError, babel.UnknownLocaleError):
        name = babel.Locale("en").languages.get(plain)
    if not name:
        return code
    return f"{name} ({script})" if script else str(name)


def listed(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """All languages by name, each with those that it is translated into."""
    targets: dict[str, set[str]] = {}
    for task in tasks:
        targets.setdefault(task.source, set()).add(task.target)
        targets.setdefault(task.target, set())
    found = (
        {"code": code, "name": language_name(code), "targets": sorted(into)}
        for code, into in targets.items()
    )
    return sorted(found, key=lambda language: (language["name"], language["code"]))
