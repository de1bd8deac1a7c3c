"""How good translations are: sacreBLEU's BLEU and chrF++, by task and averaged by resource.

BLEU depends on tokenization. Each score therefore comes with sacreBLEU's signature, and the
tokenizer depends on the target language: Chinese, Japanese and Korean have no spaces between (or
too much within) what BLEU counts as words. spBLEU tokenizes every language by FLORES-200's
vocabulary. sacreBLEU downloads that file on first use; here nothing is downloaded implicitly, and
spBLEU is computed only if the file is given (`SPBLEU_MODEL`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
from sacrebleu.utils import SACREBLEU_DIR

from gshard.mt.data.corpus import Corpus

MetricName = Literal["bleu", "chrf"]
METRICS: tuple[MetricName, ...] = ("bleu", "chrf")
GROUPS = ("high", "mid", "low")
FEW = 10  # sentences: with fewer, a score says next to nothing
# What sacreBLEU cuts these languages with, the first that works here.
_CUTS = {"zh": ("zh",), "ja": ("ja-mecab", "char"), "ko": ("ko-mecab", "char")}
_USUAL_CUT = "13a"
_PIECES = "flores200"
SPBLEU_MODEL = Path(SACREBLEU_DIR, "models", Path(SPM_MODELS[_PIECES]["url"]).name)
# In the averages of tasks; a key that a task lacks is left out of them.
_AVERAGED = (
    *("bleu", "spbleu", "chrf"),
    *(f"{system}_bleu" for system in ("copy", "nearest", "untrained", "rounded")),
    *(f"{system}_chrf" for system in ("copy", "nearest", "untrained", "rounded")),
)


@dataclass(frozen=True)
class Scores:
    """The scores of one set of translations, from 0 to 100."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    spbleu: float | None = None
    spbleu_signature: str = ""


def score(translations: Sequence[str], references: Sequence[str], target: str = "en") -> Scores:
    """Corpus-level BLEU and chrF++ of `translations` into `target`, one reference each."""
    if len(translations) != len(references) or not references:
        raise ValueError(f"{len(translations)} translations of {len(references)} references")
    metrics: dict[str, Any] = {name: metric_of(name, target) for name in METRICS}
    if SPBLEU_MODEL.is_file():
        metrics["spbleu"] = BLEU(tokenize=_PIECES)
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        found[name] = metric.corpus_score(list(translations), [list(references)]).score
        found[f"{name}_signature"] = str(metric.get_signature())
    return Scores(**found)


def metric_of(name: str, target: str) -> Any:
    """sacreBLEU's metric for translations into `target`."""
    return BLEU(tokenize=cut_of(target)) if name == "bleu" else CHRF(word_order=2)


def sentence_chrf(translation: str, reference: str) -> float:
    """chrF++ of one sentence: for people who look at examples."""
    return float(metric_of("chrf", "").sentence_score(translation, [reference]).score)


@functools.cache
def cut_of(target: str) -> str:
    """The name of sacreBLEU's tokenizer for a target language; only those that are installed.

    Without MeCab, Japanese and Korean are split into characters, as the signature shows.
    """
    base = target.replace("_", "-").split("-")[0]
    for cut in _CUTS.get(base, (_USUAL_CUT,)):
        try:
            BLEU(tokenize=cut).corpus_score(["a"], [["a"]])
        except (ImportError, RuntimeError):
            continue
        return cut
    return "char"


def resource_groups(corpus: Corpus, languages: Sequence[str]) -> dict[str, str]:
    """high, mid or low for each language: the quarter with the most pairs, and with the fewest.

    With 102 languages that makes 25, 52 and 25, as in the papers on massively multilingual
    translation. Two or three languages still have a high and a low one.
    """
    ranked = sorted(languages, key=lambda language: (-corpus.count(language), language))
    quarter = max(len(ranked) // 4, min(1, len(ranked) // 2))
    names = [GROUPS[0]] * quarter
    names += [GROUPS[1]] * (len(ranked) - 2 * quarter) + [GROUPS[2]] * quarter
    return dict(zip(ranked, names, strict=True))


def averages(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The plain mean over tasks of every score: of all, by group, and by direction if both are.

    Tasks with fewer than ten sentences are left out and counted (`few`), unless there are no
    others: one sentence right or wrong would weigh as much as a thousand of another language.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {"all": list(tasks.values())}
    for group in GROUPS:
        kinds[group] = [task for task in tasks.values() if task["group"] == group]
    into = [task for task in tasks.values() if task["target"] == "en"]
    if 0 < len(into) < len(tasks):
        kinds["to-english"] = into
        kinds["from-english"] = [task for task in tasks.values() if task["target"] != "en"]
    only_few = all(task.get("few") for task in tasks.values())
    found = {}
    for kind, members in kinds.items():
        counted = [task for task in members if only_few or not task.get("few")]
        if counted:
            means: dict[str, Any] = {
                key: math.fsum(values) / len(values)
                for key in _AVERAGED
                if (values := [task[key] for task in counted if key in task])
            }
            found[kind] = {"tasks": len(counted), "few": len(members) - len(counted), **means}
    return found


def by_test(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The same means for each test: far, near, those of other domains (`data.labels`)."""
    known = {test for task in tasks.values() for test in task.get("tests", ())}
    first = [test for test in ("far", "near") if test in known]
    return {
        test: averages(
            {
                name: {"group": task["group"], "target": task["target"], **task["tests"][test]}
                for name, task in tasks.items()
                if test in task.get("tests", ())
            }
        )
        for test in (*first, *sorted(known - {*first}))
    }
