"""One small corpus, tokenizer and encoded text for all tests that need them."""

import pytest

from gshard.mt.batching.tokenizer import VocabularyConfig, train_tokenizer
from gshard.mt.batching.tokens import open_tokens
from gshard.mt.data.gather import GatherConfig, gather
from gshard.mt.data.splits import HeldOutShares
from gshard.mt.data.user_text import parse_own
from tests.mt.samples import sentence, translated

COUNTS = {"de": 600, "ru": 150, "fr": 20}


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Compiled programs go to a folder of the tests, not to the user's."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return made_corpus(tmp_path_factory.mktemp("corpus"))


def made_corpus(folder):
    """A corpus of made-up sentences in `folder`."""
    lines = []
    for language, count in COUNTS.items():
        for n in range(count):
            lines.append(f"{language}\t{translated(n, language)}\t{sentence(n)}")
            if n % 3 == 0:  # and some short ones
                short = " ".join(sentence(n).split()[:2])
                lines.append(f"{language}\t{translated(n, language)[:9]}\t{short}")
    (folder / "a.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    own = (parse_own("tsv", str(folder / "a.tsv")),)
    return gather(GatherConfig(folder, own=own, shares=HeldOutShares(0.1, 0.1), jobs=1))[0]


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return made_tokenizer(corpus)


def made_tokenizer(corpus):
    """A small vocabulary for all its languages, both ways."""
    return train_tokenizer(corpus, VocabularyConfig(700, 600, directions="both"))


@pytest.fixture(scope="session")
def tokens(corpus, tokenizer, tmp_path_factory):
    return open_tokens(corpus, tokenizer, tmp_path_factory.mktemp("tokens"))
