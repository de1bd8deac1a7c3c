"""Tiers of sources: which packages to gather, and how to read what is inside them.

They are data, one TOML file each in `tiers/`, so that a user can edit a list, pin another version
or write a tier of their own without touching code. `client` names the package client, `packages`
what it downloads (`name` or `name==version`), `read` how the unpacked files become pairs.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_type_hints

from gshard.errors import UserError, nearest, one_of
from gshard.mt import atomic
from gshard.mt.typed import checked

Client = Literal["pip", "apt", "npm", "apt-descriptions"]
# How each client's registry spells names: none begins with a dash, and none is a path.
_NAMES = {
    "pip": re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"),
    "npm": re.compile(r"(@[A-Za-z0-9~][A-Za-z0-9._~-]*/)?[A-Za-z0-9~][A-Za-z0-9._~-]*"),
    "apt": re.compile(r"[a-z0-9][a-z0-9+.-]+"),
    "apt-descriptions": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
}
_SIBLING = re.compile(r"(-l10n|-i18n|-help|-locale|-lang)-[a-z]{2,3}(-[a-z0-9]+)*$")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+:~!_-]*")
_OPTIONS = {"pip": ("--python-version", "--ignore-requires-python")}
Format = Literal[
    "catalogs", "json", "ini", "php", "js", "properties", "mozilla", "pak", "descriptions", "html",
    "html-ids", "docbook", "mallard",
]  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How to turn files into pairs: a format, and which files of which language belong together.

    `files` is a path pattern with `{language}` in place of the language; the file of the language
    named by `english` is the English side of all files that otherwise have the same path, `{any}`
    aside. A path begins with the name of its package.
    """

    format: Format
    files: str = "**"
    english: str = "en"
    only: str = ""  # of keyed formats: a pattern that the key must match
    markup: str = ""  # "wikitext": unwrap it first
    english_from_comment: bool = False  # as `#. Default: "English"` in Plone's catalogs


@dataclass(frozen=True)
class Package:
    """One package of a registry, at a version or at whatever the registry offers."""

    client: str
    name: str
    version: str = ""

    @property
    def id(self) -> str:
        """A name for folders and stamps; the version is not in it, so that a change replaces."""
        return f"{self.client}-{self.name}".replace("/", "+")

    @property
    def requirement(self) -> str:
        """The package as its client spells it on the command line."""
        between = {"pip": "==", "apt": "=", "npm": "@"}.get(self.client, "")
        return self.name + (between + self.version if self.version else "")


@dataclass(frozen=True)
class Source:
    """Packages that are read in the same way: each on its own, or together when `together`.

    `together` is for translations that come apart from their English, as one package a language.
    """

    name: str
    packages: tuple[Package, ...]
    read: tuple[Reading, ...]
    keep: tuple[str, ...] = ("*",)  # patterns of the files worth unpacking
    together: bool = False
    licence: str = ""  # what the package itself does not say
    split: Literal["", "other"] = (
        ""  # "other" keeps a source out of training, as text of another domain
    )
    arguments: tuple[str, ...] = ()  # more arguments for the client

    def units(self) -> Iterator[Unit]:
        """The pieces that are read, cleaned and stamped one by one."""
        if self.together:
            yield Unit(self.name, self, self.packages)
        else:
            for package in self.packages:
                yield Unit(package.name, self, (package,))


@dataclass(frozen=True)
class Unit:
    """What is read in one go, and the name that its pairs carry as their origin."""

    name: str
    source: Source
    packages: tuple[Package, ...]

    @property
    def family(self) -> str:
        """The name without a language: `libreoffice-l10n-de` has the English of its siblings."""
        return _SIBLING.sub(r"\1", self.name)


@dataclass(frozen=True)
class Tier:
    """A named list of sources, the shares to hold out, and how much of each language to keep."""

    name: str
    sources: tuple[Source, ...]
    test_share: float = 0.02  # of the long sentences
    dev_share: float = 0.01
    far_share: float = 0.0  # of the packages, and of the files of those with several, of any kind
    languages: tuple[str, ...] = ()  # all
    sample: tuple[float, float] = (1.0, 1.0)  # (f, p): f * n**p training pairs of n stay

    def units(self) -> list[Unit]:
        """All units in order: earlier ones win where two have the same pair."""
        return [unit for source in self.sources for unit in source.units()]

    def packages(self) -> list[tuple[Package, Source]]:
        """Every package once, with the source that says what to unpack."""
        once: dict[str, tuple[Package, Source]] = {}
        for source in self.sources:
            for package in source.packages:
                once.setdefault(package.id, (package, source))
        return list(once.values())


def shipped() -> list[str]:
    """The names of the tiers that come with the package."""
    folder = resources.files("gshard.mt.data") / "tiers"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml"))


def load(name: str, inside: tuple[str, ...] = ()) -> Tier:
    """The tier called `name`, or the one in the TOML file of that path.

    `inside` are those that extend it.
    """
    if name in inside:
        raise UserError(f"tier {name} extends itself: {' extends '.join((*inside, name))}")
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"no tier file {name}")
        try:
            return parse(atomic.read_text(path), path.stem, (*inside, name))
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not text in UTF-8: {error}") from None
    if name not in shipped():
        raise UserError(
            f"no tier {name!r}{nearest(name, shipped())} "
            f"(tiers: {', '.join(shipped())}, or a .toml file of your own)"
        )
    text = (resources.files("gshard.mt.data") / "tiers" / f"{name}.toml").read_text(
        encoding="utf-8"
    )
    return parse(text, name, (*inside, name))


def parse(text: str, name: str, inside: tuple[str, ...] = ()) -> Tier:
    """A tier from TOML; every misspelt key is an error that names the nearest one."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"tier {name}: {error}") from None
    settings = {k: v for k, v in get_type_hints(Tier).items() if k not in ("name", "sources")}
    written = {"extends": str, "only": tuple[str, ...], "source": tuple[dict[str, Any], ...]}
    data = checked({**settings, **written}, data, f"tier {name}: ")
    sources = [_source(entry, name) for entry in data.pop("source", ())]
    if parent := data.pop("extends", ""):
        # The parent's sources come first: gathering the larger tier keeps what the smaller kept.
        base = load(parent, inside)
        sources = [*base.sources, *sources]
        data = {key: getattr(base, key) for key in settings} | data
    if only := data.pop("only", ()):
        sources = _chosen(sources, set(only), name)
    return Tier(name, tuple(sources), **data)


def _chosen(sources: list[Source], only: set[str], tier: str) -> list[Source]:
    """Sources with the packages that are in `only`, by their own or by their source's name."""
    known = {name for each in sources for name in (each.name, *(p.name for p in each.packages))}
    for name in sorted(only - known):
        raise UserError(f"tier {tier}: only: no package {name!r}{nearest(name, known)}")
    names = [tuple(p for p in each.packages if {each.name, p.name} & only) for each in sources]
    pairs = zip(sources, names, strict=True)
    return [replace(source, packages=packages) for source, packages in pairs if packages]


def _source(entry: dict[str, Any], tier: str) -> Source:
    where = f"tier {tier}, source {entry.get('name', '?')!r}: "
    kinds = {**get_type_hints(Source), "client": Client, "packages": tuple[str, ...]}
    values = checked(kinds, entry, where, required=("name", "client", "packages", "read"))
    client, packages = values.pop("client"), []
    for text in values.pop("packages"):
        name, _, version = text.partition("==")
        _spelling(name, _NAMES[client], f"{where}package")
        if version:
            _spelling(version, _VERSION, f"{where}version of {name}")
        packages.append(Package(client, name, version))
    for argument in values.get("arguments", ()):
        if argument.startswith("-"):
            one_of(f"{where}argument", argument, _OPTIONS.get(client, ()))
        else:
            _spelling(argument, _VERSION, f"{where}argument")
    return Source(packages=tuple(packages), **values)


def _spelling(text: str, pattern: re.Pattern[str], where: str) -> None:
    """Refuse what is no name: a client would take it for an option, a path or an address."""
    if not pattern.fullmatch(text):
        raise UserError(f"{where} {text!r} is not a valid name")
