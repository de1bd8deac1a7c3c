"""The fields of requests: one table for reading them, for errors about them, and for OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gshard.mt.decoding.texts import well_formed
from gshard.mt.errors import nearest
from gshard.mt.serving.service import RefusedError


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
