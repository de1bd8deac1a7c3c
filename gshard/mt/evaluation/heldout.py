"""The held-out sentences that a system is measured on: which ones, of which tasks.

Which sentences are taken when not all are depends on the sentences alone, so that everybody who
measures n of a language measures the same n, and more of them include those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gshard.mt.batching.tokenizer import Task, Tokenizer
from gshard.mt.data.corpus import Corpus
from gshard.mt.data.splits import SPLITS, fingerprint
from gshard.mt.errors import UserError, nearest


@dataclass(frozen=True)
class HeldOut:
    """Sentences of one task and their references."""

    task: Task
    sources: tuple[str, ...]
    references: tuple[str, ...]
    train_pairs: int

    def __len__(self) -> int:
        return len(self.sources)


def tasks_of(tokenizer: Tokenizer, languages: Sequence[str] = ()) -> list[Task]:
    """The directions between English and `languages` that a model was trained for, or all."""
    for language in languages:
        if language not in tokenizer.config.languages:
            known = tokenizer.config.languages
            raise UserError(
                f"the run has no language {language!r}{nearest(language, known)} "
                f"(it has {', '.join(known)})"
            )
    return [task for task in tokenizer.tasks if not languages or task.foreign in languages]


def held_out(
    corpus: Corpus, tasks: Sequence[Task], split: str = "test", most: int = 0
) -> list[HeldOut]:
    """At most `most` (0: all) sentences of each task, the one with the most training pairs first.

    A task without sentences in `split` is left out; if all are, that is an error.
    """
    if split not in SPLITS:
        raise UserError(f"no split {split!r}{nearest(split, SPLITS)}")
    if most < 0:
        raise UserError(f"{most} sentences of each language are not possible; 0 means all")
    found = []
    for task in sorted(tasks, key=lambda task: (-corpus.count(task.foreign), str(task))):
        if not corpus.count(task.foreign, split):
            continue
        pairs = list(corpus.pairs(task.foreign, split))
        if most and len(pairs) > most:
            # By hash, then back in the order of the file.
            ranked = sorted(range(len(pairs)), key=lambda i: fingerprint("\t".join(pairs[i])))
            pairs = [pairs[i] for i in sorted(ranked[:most])]
        foreign, english = zip(*pairs, strict=True)
        sides = (foreign, english) if task.target == "en" else (english, foreign)
        found.append(HeldOut(task, sides[0], sides[1], corpus.count(task.foreign)))
    if not found:
        asked = ", ".join(dict.fromkeys(task.foreign for task in tasks))
        has = [s for s in SPLITS if any(corpus.count(task.foreign, s) for task in tasks)]
        raise UserError(
            f"no {split} sentences of {asked} in {corpus.folder}"
            + (f"; there are {' and '.join(has)} ones (--split)" if has else "")
        )
    return found
