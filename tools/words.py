"""Phrases that readers had to read twice, and what to write instead.

`python -m tools.hygiene` looks for them in the pages of docs/ and in the docstrings, comments and
messages of gshard/. A phrase is listed only if it has no good use.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

PHRASES = {
    r"travel(s|led)? together": "are combined",
    r"(come|comes|goes|go|going) round\b": "pass around a ring",
    r"of which nothing (is|was) (said|known)": "without an annotation",
    r"nothing (is|was) said about": "left open",
    r"\b(lie|lies|lay) (like|so|whole|by groups|there|here|elsewhere)\b": "has the sharding",
    r"\b(is|are|runs?|kept|held) whole on (every|all)\b": "replicated",
    r"in the (user's )?words of\b": "as ... describes",
    r"(made|written|computed) anew\b": "recomputed, rewritten",
    r"\bsums? that waits?\b": "unreduced value",
    r"keys that (visit|come)": "blocks of keys",
    r"on hardware that need not be there": "on hardware that you need not have",
    r"\bpass(es)? by Python\b": "bypass Python",
    r"\bhow (the|a|its) [a-z]+ lay\b": "the sharding of",
    r"\bfor nothing\b": "free, or in vain",
    r"\bof all that there (is|are)\b": "of all",
    r"\bthose of them\b": "the ones",
    r"\bbeside (XLA|`?jax\.jit|those of experts|others\b(?! that))": "compared with",
    r"\bwhat (searches|binds)\b": "the noun: engine, limit",
    r"\b(tokens|sentences|texts|requests|words|pairs|bytes) a (second|minute|hour|day)\b": "per",
    r"\b(tokens|sentences|ms|seconds) a step\b": "per step",
    # A sentence begins with the thing itself, and calls it by its name.
    r"(?-i:\bOf (?!course))": "the noun first",
    r"(?-i:\bThose )": "the noun",
}
PAGES = {  # in pages alone: code has things beside others
    r"\bbeside\b": "compared with, during, next to",
}


def prose(path: Path) -> list[tuple[int, str]]:
    """The prose of a file, with line numbers: a page, or the comments and strings of a program."""
    text = path.read_text()
    if path.suffix != ".py":
        return [(1, text)]
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


def is_read(path: Path) -> bool:
    """Whether a file has prose for readers: pages of docs, and the package."""
    return (path.suffix == ".md" and path.parts[0] == "docs") or (
        path.suffix == ".py" and path.parts[0] == "gshard"
    )


def phrases(path: Path) -> list[str]:
    """The listed phrases in a file, each with its line."""
    found = []
    for first, text in prose(path):
        flat = re.sub(r"\s", " ", text)  # of the same length, so that lines can be counted
        listed = [*PHRASES, *(PAGES if path.suffix == ".md" else ())]
        for match in re.finditer("|".join(f"(?:{each})" for each in listed), flat, re.IGNORECASE):
            line = first + text.count("\n", 0, match.start())
            found.append(f"line {line}: {match[0]!r}; see tools/words.py")
    return found
