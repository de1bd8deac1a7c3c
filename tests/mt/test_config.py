"""Settings: typed, named, refused when they are wrong, the same after a round trip."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.errors import UserError
from gshard.mt import config as configs
from gshard.mt.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("model.experts=16", 16),
        ("model.groups=none", None),
        ("model.groups=4", 4),
        ("model.remat=layer", "layer"),
        ("model.remat=2_000", 2000),
        ("model.gating.top_k=1", 1),
        ("model.gating.second_expert=sampling", "sampling"),
        ("optimizer.learning_rate=1e-3", 1e-3),
        ("devices.split_update=true", True),
        ("reproducible=true", True),
        ("vocabulary.languages=de,fr", ("de", "fr")),
        ("data.corpus=a=b", "a=b"),
    ],
)
def test_an_override_has_the_type_of_its_setting(assignment, value):
    changed = configs.override(preset("tiny"), [assignment])
    found = {name: v for name, v, _ in configs.settings(changed)}
    name = assignment.partition("=")[0]
    assert found[name] == value
    assert type(found[name]) is type(value)
    before = {name: v for name, v, _ in configs.settings(preset("tiny"))}
    assert {n for n in before if before[n] != found[n]} <= {name}


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("model.expert=16", "did you mean 'model.experts'"),
        ("optimizer.learningrate=1", "did you mean 'optimizer.learning_rate'"),
        ("trian.steps=1", "did you mean 'train.steps'"),
        ("model.experts=many", "'many' is not a whole number"),
        ("model.gating.top_k=3", "'3' is not 1 or 2"),
        ("model.dtype=float16", "is not float32 or bfloat16; did you mean 'bfloat16'"),
        ("devices.split_update=maybe", "true or false"),
        ("model.remat=sometimes", "is not none or layer"),
        ("model.encoder_layers=3", "layers come in pairs"),
        ("model.source_vocab=7", "no setting"),  # the vocabularies say how many
        ("steps", "name=value"),
        ("train.save_every=0", "train.save_every is 0; it must be at least 1"),
        ("train.steps=-1", "train.steps is -1; it must be at least 1"),
        ("model.heads=0", "model.heads is 0; it must be at least 1"),
        ("model.experts=-1", "model.experts is -1; it must be at least 0"),
        ("model.input_dropout=1", "at least 0 and at most 0.999"),
        ("optimizer.learning_rate=nan", "learning_rate is nan; it must be at least 0"),
        ("train.seed=99999999999999999999", "at most 2,147,483,647"),
        ("devices.tensor=0", "devices.tensor is 0; it must be at least 1"),
    ],
)
def test_a_wrong_setting_is_an_error_that_helps(assignment, said):
    with pytest.raises(UserError, match=said):
        configs.override(preset("tiny"), [assignment])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_round_trip(name):
    config = preset(name)
    assert configs.from_json(json.loads(json.dumps(configs.to_json(config)))) == config


@given(st.sampled_from([name for name, _, _ in configs.settings(preset("tiny"))]), st.data())
def test_settings_round_trip_through_text_and_json(name, data):
    """What `--settings` prints is what the command line takes."""
    kind = {n: k for n, _, k in configs.settings(preset("tiny"))}[name]
    drawn = {
        int: st.integers(1, 9).map(lambda n: 2 * n),
        float: st.floats(0.01, 1.0),
        bool: st.booleans(),
    }.get(kind)
    if drawn is None:
        return
    value = data.draw(drawn)
    changed = configs.override(preset("tiny"), [f"{name}={value}"])
    assert configs.from_json(json.loads(json.dumps(configs.to_json(changed)))) == changed


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        preset("tyni")
    tree = configs.to_json(preset("tiny"))
    tree["train"]["step"] = 3
    with pytest.raises(UserError, match=r"no setting 'train.step'; did you mean 'steps'"):
        configs.from_json(tree)
    bad = tmp_path / "config.json"
    bad.write_text("{")
    with pytest.raises(UserError, match="does not contain a configuration"):
        configs.read(bad)


def test_what_a_resumed_run_may_not_change():
    config = preset("tiny")
    allowed = ["train.steps=7", "devices.count=4", "train.keep=9", "data.corpus=elsewhere"]
    assert configs.conflicts(config, configs.override(config, allowed), 5) == []
    other = configs.override(config, ["batch.seed=1", "model.experts=16"])
    assert configs.conflicts(config, other, 0) == [
        "model.experts was 8 and is now 16",
        "batch.seed was 0 and is now 1",
    ]


def test_a_fall_of_the_learning_rate_may_be_decided_late():
    config = preset("tiny")
    falling = configs.override(config, ["optimizer.fall=40", "optimizer.end=100"])
    assert configs.conflicts(config, falling, 60) == []
    assert configs.conflicts(falling, config, 60) == []
    was, now = config.optimizer, falling.optimizer
    assert configs.conflicts(config, falling, 61) == [
        f"optimizer.fall was {was.fall} and is now {now.fall}",
        f"optimizer.end was {was.end} and is now {now.end}",
    ]


def test_the_dense_preset_does_the_arithmetic_of_the_sparse_one():
    from gshard.nn.config import forward_flops

    tiny, dense = (forward_flops(preset(name).model)[0] for name in ("tiny", "dense"))
    gate = 2 * preset("tiny").model.model_dim * preset("tiny").model.experts
    assert tiny - gate == dense


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("train.steps", "many", "train.steps is 'many', which is not a whole number"),
        ("train.steps", 3.5, "train.steps is 3.5, which is not a whole number"),
        ("train.steps", True, "train.steps is True, which is not a whole number"),
        ("train.spike", None, "train.spike is None, which is not a number"),
        ("data.corpus", 5, "data.corpus is 5, which is not text"),
        ("vocabulary.languages", "de", "vocabulary.languages is 'de', which is not a list"),
        ("model.gating", [], r"model.gating is \[\], and not a table of settings"),
        ("train.keep", 0, "train.keep is 0; it must be at least 1"),
        ("optimizer.name", "sgd", "optimizer.name is 'sgd', which is not adafactor or adam"),
    ],
)
def test_a_wrong_type_in_a_file_is_said_plainly(tmp_path, name, value, said):
    nested = configs.to_json(preset("tiny"))
    inner, (*path, last) = nested, name.split(".")
    for part in path:
        inner = inner[part]
    inner[last] = value
    (tmp_path / "config.json").write_text(json.dumps(nested))
    with pytest.raises(UserError, match=said):
        configs.read(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["[]", "5", "null", '{"model": 3}', "{", '{"model": {}}'])
def test_what_is_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        configs.read(tmp_path / "config.json")


NUMBERS = [name for name, _, kind in configs.settings(preset("tiny")) if kind in (int, int | None)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [10**20, -(10**20), 2**31])
def test_a_number_that_no_array_can_have_is_refused(name, value):
    with pytest.raises(UserError, match=r"at most|at least|needs rows"):
        configs.override(preset("tiny"), [f"{name}={value}"])


@pytest.mark.parametrize("name", ["capacity_factor", "eval_capacity_factor"])
def test_a_capacity_that_no_expert_can_have_is_refused(name):
    with pytest.raises(UserError, match="at most 1,000,000,000,000"):
        configs.override(preset("tiny"), [f"model.gating.{name}=1e308"])


def test_what_may_be_infinite_and_what_has_many_bytes():
    given = ["batch.temperature=inf", "train.spike=inf", f"model.remat={80 << 30}"]
    changed = configs.override(preset("tiny"), given)
    assert changed.model.remat == 80 << 30
