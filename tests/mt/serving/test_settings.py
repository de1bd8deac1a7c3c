"""Keys: the file, and limits that are shared."""

import pytest

from gshard.errors import UserError
from gshard.mt.serving import settings
from gshard.mt.serving.settings import ApiKeys, Key, read_keys

GOOD = '[[key]]\nname = "a"\nkey = "long enough"\nper_minute = 6\n'


def test_a_file_of_keys(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(GOOD + '[[key]]\nname = "b"\nkey = "another one"\n')
    assert read_keys(path) == (Key("a", "long enough", 6), Key("b", "another one", 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tables with a name and a key"),
        ("x", "cannot be read"),
        (
            GOOD.replace("per_minute", "per_hour"),
            "no setting 'key.per_hour'; did you mean 'per_minute'",
        ),
        (GOOD.replace("name", "#"), "'key.name' is missing"),
        (GOOD.replace("6", '"6"'), "per_minute is '6', which is not a whole number"),
        (GOOD.replace("6", "-1"), "per_minute is -1; it must be at least 0"),
        (GOOD.replace("long enough", "short"), "8 characters or more"),
        (GOOD + GOOD, "the same name 'a'"),
        (GOOD + GOOD.replace('"a"', '"b"'), "the same key"),
        ("key = [1]", "key is 1, and not a table"),
        (GOOD.replace("long", "längste"), "of ASCII, as headers are"),
        (GOOD.replace("long enough", "long enough "), "without spaces around it"),
        (GOOD.replace("6", "1" + "0" * 400), "at most 1,000,000,000"),
        ("key = " + "[" * 100_000, "cannot be read"),
    ],
)
def test_mistakes_in_it_are_told(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as told:
        read_keys(path)
    assert "long enough" not in str(told.value)  # a key is no one else's business
    with pytest.raises(UserError, match="no file"):
        read_keys(tmp_path / "none")


def test_a_limit_by_the_clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(settings.time, "monotonic", lambda: clock[0])
    few, free = Key("few", "few few few", 6), Key("free", "free free")
    known = ApiKeys((few, free))
    assert (known.find("few few few"), known.find("few"), known.find("")) == (few, None, None)
    assert [known.wait(few, 2) for _ in range(4)] == [0, 0, 0, 20]
    assert [known.wait(free, 1000) for _ in range(3)] == [0] * 3
    clock[0] += 19.9
    assert known.wait(few, 2) == 1
    clock[0] += 0.1
    assert known.wait(few, 2) == 0
    clock[0] += 60
    assert known.wait(few, 100) == 0  # once a minute's worth is there; the rest is owed
    assert known.wait(few, 1) == 950


def test_everyone_shares_one_limit():
    known = ApiKeys((), is_open=True, per_minute=2)
    everyone = known.find("")
    assert [known.wait(everyone, 1) > 0 for _ in range(3)] == [False, False, True]
