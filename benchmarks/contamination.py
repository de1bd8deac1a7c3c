"""Held-out sentences of a corpus that its training text has too, after normalisation.

    python -m benchmarks.contamination CORPUS [--split test]

Case, punctuation, digits and spaces are folded, so that "Save file 1?" is "save file". English is
compared with the training text of all languages, sources with that of their own language. English
that is close to training English (`gshard.mt.data.labels`) is counted, too.
"""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Iterable

from gshard.mt.data.corpus import Corpus
from gshard.mt.data.labels import close
from gshard.mt.data.splits import fold


def folded(text: str) -> str:
    """The letters and marks of a text, in one case."""
    text = unicodedata.normalize("NFKC", text).casefold()
    kept = (c if unicodedata.category(c)[0] in "LM" else " " for c in text)
    return " ".join("".join(kept).split())


def shared(held_out: Iterable[str], training: Iterable[str]) -> int:
    """How many held-out sentences are in the training text, folded."""
    known = set(map(folded, training))
    return sum(folded(text) in known for text in held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus")
    parser.add_argument("--split", default="test", choices=["dev", "test"])
    args = parser.parse_args()
    corpus = Corpus.open(args.corpus)

    def column(language: str, split: str, name: str) -> list[str]:
        texts: list[str] = corpus.read(language, split, [name])[name].to_pylist()
        return texts

    everywhere = [t for name in corpus.languages for t in column(name, "train", "english")]
    held_out = [t for name in corpus.languages for t in column(name, args.split, "english")]
    english = shared(held_out, everywhere)
    sources = sum(
        shared(column(name, args.split, "source"), column(name, "train", "source"))
        for name in corpus.languages
    )
    print(f"{len(held_out):,} sentences of {args.split} in {len(corpus.languages)} languages")
    print(f"in the training text, folded: {english:,} English ones, {sources:,} sources")
    keys = sorted({fold(text) for text in held_out})
    is_close = dict(zip(keys, close(keys, {fold(text) for text in everywhere}), strict=True))
    rows = sum(is_close[fold(text)] for text in held_out)
    print(
        f"close to training English: {sum(is_close.values()):,} of {len(keys):,} distinct English "
        f"ones, {rows:,} rows"
    )


if __name__ == "__main__":
    main()
