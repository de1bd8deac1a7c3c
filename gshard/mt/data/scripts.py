"""Which script a language is written in: the cheapest test of whether a string is in it at all.

A catalog labelled Georgian is full of English where it is untranslated; the script detects that.
Languages absent from `languages.toml` are written in Latin letters.
"""

from __future__ import annotations

import re
import tomllib
from importlib import resources

_TABLES = tomllib.loads(
    (resources.files("gshard.mt.data") / "languages.toml").read_text(encoding="utf-8")
)
_LETTERS = {name: re.compile(f"[{ranges}]") for name, ranges in _TABLES["scripts"].items()}
_SCRIPTS = {
    language: tuple(scripts.split())
    for scripts, languages in _TABLES["written_in"].items()
    for language in languages.split()
}
_LETTER = re.compile(r"[^\W\d_]")
LATIN = _LETTERS["latin"]


def scripts_of(language: str) -> tuple[str, ...]:
    """The scripts that `language` is written in, Latin unless the table says otherwise."""
    return _SCRIPTS.get(language, ("latin",))


def count_letters(text: str) -> int:
    """How many letters of any script `text` has."""
    return len(_LETTER.findall(text))


def in_script(language: str, text: str) -> bool:
    """Whether enough letters of `text` are in a script of `language`.

    A third suffices for scripts other than Latin, whose text is full of Latin names and commands;
    Latin needs more, because what is left over then is another script altogether.
    """
    letters = count_letters(text)
    if letters == 0:
        return False
    return any(
        len(_LETTERS[script].findall(text)) >= (0.6 if script == "latin" else 0.35) * letters
        for script in scripts_of(language)
    )
