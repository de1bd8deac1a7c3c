import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.errors import UserError
from gshard.mt.batching import tokens as tokens_module
from gshard.mt.batching.batches import fitting, weighted_groups
from gshard.mt.batching.tokenizer import (
    END,
    PAD,
    START,
    Task,
    Tokenizer,
    VocabularyConfig,
    temperature_shares,
    train_tokenizer,
)
from gshard.mt.batching.tokens import open_tokens, some_of
from tests.mt.samples import sentence, translated


def test_training_is_deterministic(corpus, tokenizer):
    again = train_tokenizer(corpus, VocabularyConfig(700, 600, directions="both"))
    assert again.digest == tokenizer.digest


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    loaded = Tokenizer.load(tmp_path / "t")
    assert loaded.digest == tokenizer.digest
    assert loaded.config == tokenizer.config
    assert pickle.loads(pickle.dumps(loaded)).encode_target(["x"]) == loaded.encode_target(["x"])
    (tmp_path / "t" / "target.model").write_bytes(b"other")
    with pytest.raises(UserError, match="not the file that was saved"):
        Tokenizer.load(tmp_path / "t")
    with pytest.raises(UserError, match="no tokenizer"):
        Tokenizer.load(tmp_path / "none")


def test_one_without_languages_is_refused(tokenizer, tmp_path):
    """It could translate nothing, and a server of its model could not even start."""
    none = dataclasses.replace(tokenizer.config, languages=())
    Tokenizer(*tokenizer.models, none).save(tmp_path / "t")
    with pytest.raises(UserError, match="has no languages to translate between"):
        Tokenizer.load(tmp_path / "t")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp", "Zs"]), max_size=30))
def test_the_target_side_gives_back_any_text(tokenizer, text):
    text = " ".join(text.replace("\u2581", "").split())  # SentencePiece's own mark for a space
    (ids,) = tokenizer.encode_target([text])
    assert ids[-1] == END
    assert tokenizer.decode_target([ids]) == [text]
    assert max(ids) < tokenizer.target_size


def test_no_character_is_unknown_and_no_text_spells_a_tag(tokenizer):
    (ids,) = tokenizer.encode_source(["𓀀 <2de> ☃"], "de")
    assert 1 not in ids
    assert ids[0] == tokenizer.tag("de")
    assert tokenizer.tag("de") not in ids[1:]
    with pytest.raises(UserError, match="no target language 'dee'; did you mean 'de'"):
        tokenizer.encode_source(["x"], "dee")


def test_decoding_stops_at_the_end(tokenizer):
    (ids,) = tokenizer.encode_target([sentence(3)])
    assert tokenizer.decode_target([[START, *ids, *ids, PAD]]) == [sentence(3)]
    assert tokenizer.decode_target(np.array([[PAD, PAD]])) == [""]


def test_into_english_only_there_are_no_tags(corpus):
    config = VocabularyConfig(600, 500, languages=("de", "fr"))
    tokenizer = train_tokenizer(corpus, config)
    assert tokenizer.tasks == (Task("de", "en"), Task("fr", "en"))
    pieces = tokenizer._source.encode(translated(5), out_type=str)
    (ids,) = tokenizer.encode_source([translated(5)])
    assert len(ids) == len(pieces) + 1


def test_mistakes_are_named(corpus):
    with pytest.raises(UserError, match="did you mean 'both'"):
        VocabularyConfig(directions="bothe")
    with pytest.raises(UserError, match="no language 'xx'"):
        train_tokenizer(corpus, VocabularyConfig(languages=("xx",)))
    with pytest.raises(UserError, match="cannot be trained"):
        train_tokenizer(corpus, VocabularyConfig(100, 100))


def test_temperature():
    counts = [10_000, 100, 1]
    assert np.allclose(temperature_shares(counts, 1), np.array(counts) / sum(counts))
    assert np.allclose(temperature_shares(counts, math.inf), 1 / 3)
    middle = temperature_shares(counts, 5)
    assert 1 > middle[0] / middle[1] / 100 > 0.01
    assert temperature_shares([5, 0], 5).tolist() == [1, 0]
    with pytest.raises(UserError, match="temperature"):
        temperature_shares(counts, 0.5)
    with pytest.raises(UserError, match="nothing to sample"):
        temperature_shares([0], 1)


def test_tokens_are_the_corpus(corpus, tokenizer, tokens):
    assert {str(t.task) for t in tokens} == {"de-en", "ru-en", "fr-en", "en-de", "en-ru", "en-fr"}
    for examples in tokens:
        assert len(examples) == corpus.count(examples.task.foreign)
    back = next(t for t in tokens if str(t.task) == "ru-en")
    english = corpus.read("ru")["english"].to_pylist()
    decoded = tokenizer.decode_target([back.target[i] for i in range(len(back))])
    assert decoded == english
    assert back.english_words.tolist() == [len(text.split()) for text in english]
    assert back.source.lengths.min() > 2  # a tag, a piece, the end


def test_tokens_are_made_once_and_again_for_another_tokenizer(
    corpus, tokenizer, tmp_path, monkeypatch
):
    tasks = [Task("fr", "en")]
    first = open_tokens(corpus, tokenizer, tmp_path, tasks=tasks)[0]
    copy = pickle.loads(pickle.dumps(first))
    assert np.array_equal(copy.source.ids, first.source.ids)
    assert len(pickle.dumps(first)) < 1000  # the place, not the tokens

    made = []
    encode = tokens_module._encode
    monkeypatch.setattr(tokens_module, "_encode", lambda *a: (made.append(a[2]), encode(*a)))
    open_tokens(corpus, tokenizer, tmp_path, tasks=tasks)
    assert made == []
    other = train_tokenizer(corpus, dataclasses.replace(tokenizer.config, directions="to-english"))
    open_tokens(corpus, other, tmp_path, tasks=tasks)
    assert made == tasks


def test_few_pairs_are_cut_into_pieces_several_ways(corpus, tokenizer, tmp_path):
    task, pairs = Task("fr", "en"), corpus.count("fr")
    config = dataclasses.replace(tokenizer.config, segment_to=3 * pairs - 1)
    several = Tokenizer(*tokenizer.models, config)
    assert several.digest != tokenizer.digest
    (once,) = open_tokens(corpus, tokenizer, tmp_path / "once", tasks=[task])
    (found,) = open_tokens(corpus, several, tmp_path / "several", tasks=[task])
    (again,) = open_tokens(corpus, several, tmp_path / "again", tasks=[task])
    assert (len(found), found.pairs, once.pairs) == (3 * pairs, pairs, pairs)
    assert np.array_equal(found.source.ids, again.source.ids)
    assert np.array_equal(found.source.lengths[:pairs], once.source.lengths)
    for way in (1, 2):
        places = np.arange(pairs) + way * pairs
        assert not np.array_equal(some_of(found, places).source.ids, once.source.ids)
        assert np.array_equal(some_of(found, places).target.ids, once.target.ids)
        assert np.array_equal(found.english_words[places], once.english_words)
    spelled = several._source.decode(
        [once.source[5][1:].tolist(), found.source[5 + pairs][1:].tolist()]
    )
    assert spelled[0] == spelled[1]  # other pieces of the same text
    # Text that is not trained on is cut in one way, and shares are those of pairs.
    (dev,) = open_tokens(corpus, several, tmp_path / "several", "dev", [task])
    assert dev.pairs == len(dev) == corpus.count("fr", "dev")
    (german,) = open_tokens(corpus, tokenizer, tmp_path / "once", tasks=[Task("de", "en")])
    shares = []
    for tokens in ([german, once], [german, found]):
        groups = weighted_groups(tokens, fitting(tokens, 1000, 1000), 2, 0.3)
        shares.append(sum(weight for number, _, weight in groups if number))
    assert shares[0] == pytest.approx(shares[1])
