"""Tables of JSON and TOML as dataclasses, by the types of their fields.

A name that does not exist, or a value of another type, is an error that says what is allowed. Lists
become tuples.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from math import inf
from typing import Annotated, Any, Literal

from gshard.errors import UserError, nearest
from gshard.untrusted import short_repr


def alternatives(kind: Any) -> list[Any]:
    """What a value of this type may be: plain types, and the values of a Literal."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return alternatives(parts[0])
    if origin in (typing.Union, types.UnionType):
        return [each for part in parts for each in alternatives(part)]
    return list(parts) if origin is Literal else [kind]


def described(kind: Any) -> str:
    """The same in words."""
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false",
             type(None): "none", dict: "a table"}  # fmt: skip

    def told(each: Any) -> str:
        origin, parts = typing.get_origin(each), typing.get_args(each)
        if origin is tuple:
            count = "" if parts[-1] is ... else f" of {len(parts)}"
            return f"a list{count}, each {described(parts[0])}"
        kind = origin or each
        return words.get(kind, "a table") if isinstance(kind, type) else str(each)

    return " or ".join(map(told, alternatives(kind)))


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; whole numbers are numbers."""

    def fits(each: Any) -> bool:
        origin, parts = typing.get_origin(each), typing.get_args(each)
        if origin is tuple:
            fixed = parts[-1] is not ...
            if not isinstance(value, tuple) or (fixed and len(parts) != len(value)):
                return False
            return all(is_a(x, parts[0]) for x in value)
        if each in (int, float):
            numbers = (int, float) if each is float else (int,)
            return isinstance(value, numbers) and not isinstance(value, bool)
        kind = origin or each
        return isinstance(value, kind) if isinstance(kind, type) else value == each

    return any(map(fits, alternatives(kind)))


def checked(
    kinds: Mapping[str, Any],
    table: Mapping[str, Any],
    where: str = "",
    prefix: str = "",
    required: Sequence[str] = (),
) -> dict[str, Any]:
    """The values of a table, each of its kind; errors begin with `where`, names with `prefix`."""
    for name in table:
        if name not in kinds:
            raise UserError(f"{where}no setting {prefix + name!r}{nearest(name, kinds)}")
    for name in required:
        if name not in table:
            raise UserError(f"{where}{prefix + name!r} is missing")
    return {name: _value(kinds[name], x, prefix + name, where) for name, x in table.items()}


def _value(kind: Any, value: Any, name: str, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise UserError(f"{where}{name} is {short_repr(value)}, and not a table of settings")
        return built(kind, value, where, f"{name}.")
    if isinstance(value, list):
        parts = typing.get_args(kind) if typing.get_origin(kind) is tuple else (Any,)
        value = tuple(_value(parts[0], each, name, where) for each in value)
    if kind is not Any and not is_a(value, kind):
        literals = [each for each in alternatives(kind) if isinstance(each, str)]
        hint = nearest(value, literals) if isinstance(value, str) else ""
        shown = short_repr(value)
        raise UserError(f"{where}{name} is {shown}, which is not {described(kind)}{hint}")
    if why := out_of_bounds(value, kind):
        raise UserError(f"{where}{name} {why}")
    return value


def out_of_bounds(value: Any, kind: Any, usual: tuple[float, float] = (-inf, inf)) -> str:
    """Why a number is none of those that its type is annotated with, or else of the usual."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    least, most = getattr(kind, "__metadata__", [usual])[0]
    if least <= value <= most:  # nan is not
        return ""
    end = "" if most == inf else f" and at most {most:,}"
    return f"is {value:,}; it must be at least {least:,}{end}"


def built(kind: Any, table: Mapping[str, Any], where: str = "", prefix: str = "") -> Any:
    """A dataclass from a table."""
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    kinds = typing.get_type_hints(kind, include_extras=True)
    try:
        return kind(**checked(kinds, table, where, prefix, required))
    except (TypeError, ValueError) as error:
        about = prefix.rstrip(".") or "the configuration"
        raise UserError(f"{where}{about}: {error}") from None
