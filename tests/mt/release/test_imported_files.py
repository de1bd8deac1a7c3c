"""Damaged and hostile checkpoints: imported as they are, or refused in one line."""

import contextlib
import dataclasses
import io
import json
import os
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gshard import cli
from gshard.mt.release import exported
from gshard.mt.release.imported import load_import, read_checkpoint
from gshard.mt.release.imported_files import TheirSettings
from gshard.mt.training.weights import named
from tests.mt.release.checkpoints import M, files, write
from tests.nn import models

KINDS = ("dense", "sparse")


@pytest.fixture(scope="module")
def whole():
    return {kind: files(kind) for kind in KINDS}


def imported(folder):
    """The error of the command, "" if it imports; never anything but one line."""
    out, err = folder.parent / f"{folder.name}-out", io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(err):
        cli.main(["import", str(folder), "--out", str(out)])
    said = err.getvalue()
    assert bool(ended.value.code) == bool(said), said
    if said:
        assert ended.value.code == 1, said
        assert said.startswith("gshard: ")
        assert said.count("\n") == 1
        assert said[:-1].isprintable()
        assert not out.exists()
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_well_is_imported(kind, whole, tmp_path):
    write(tmp_path / "theirs", *whole[kind])
    assert imported(tmp_path / "theirs") == ""
    for again in (load_import(tmp_path / "theirs-out"), read_checkpoint(tmp_path / "theirs")):
        found = named(again)["encoder.0.dense.feed_forward.wi"]
        assert found.shape == (M, 32)  # padded to the decoder's
        inside = "ffn." if kind == "sparse" else ""
        want = whole[kind][1][f"{LAYER}{inside}fc1.weight"]
        np.testing.assert_array_equal(found[:, :24], want.T)
        assert not found[:, 24:].any()


LAYER = "model.encoder.layers.0."
TENSORS = {
    "a LayerNorm of one value": ("dense", LAYER + "self_attn_layer_norm.weight", lambda x: x[:1]),
    "a bias of three": ("dense", LAYER + "self_attn.out_proj.bias", lambda x: x[:3]),
    "a table of 7 columns": ("dense", "model.shared.weight", lambda x: x[:, :7]),
    "a table of fewer rows": ("dense", "model.shared.weight", lambda x: x[:50]),
    "a flat projection": ("dense", LAYER + "self_attn.q_proj.weight", lambda x: x.reshape(-1)),
    "transposed": ("dense", LAYER + "fc1.weight", lambda x: np.ascontiguousarray(x.T)),
    "bools": ("dense", LAYER + "fc1.bias", lambda x: x > 0),
    "integers": ("dense", LAYER + "fc1.bias", lambda x: x.astype(np.int32)),
    "NaN": ("dense", LAYER + "fc1.bias", lambda x: x * np.nan),
    "infinite in float32": ("dense", LAYER + "fc1.bias", lambda x: x.astype(float) * 1e300),
    "an expert that is smaller": (
        "sparse",
        "model.encoder.layers.1.ffn.experts.expert_2.fc1.bias",
        lambda x: x[:-1],
    ),
    "a router of fewer experts": (
        "sparse",
        "model.decoder.layers.1.ffn.router.classifier.weight",
        lambda x: x[:3],
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_is_not_as_config_json_says(case, whole, tmp_path):
    kind, name, change = TENSORS[case]
    settings, arrays, words = whole[kind]
    write(tmp_path / "theirs", settings, {**arrays, name: change(arrays[name])}, words)
    err = imported(tmp_path / "theirs")
    assert name in err or "the table has 50 rows" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_layers": 0}, "encoder_layers is 0; it must be at least 1"),
        ({"encoder_ffn_dim": -1}, "encoder_ffn_dim is -1; it must be at least 1"),
        ({"encoder_layers": 10**6}, "has no tensor model.encoder.layers.2."),
        ({"num_experts": 10**6}, "shape [4, 16], and by config.json [1000000, 16]"),
        ({"decoder_layers": 4}, "has no tensor model.decoder.layers.2."),
        ({"d_model": 3 * M}, "the tensor model.shared.weight has the shape"),
        ({"encoder_attention_heads": 3, "decoder_attention_heads": 3}, "not a multiple"),
        ({"moe_token_dropout": float("nan")}, "moe_token_dropout is nan"),
        ({"activation_function": "\x1b[2J"}, r"activation '\x1b[2J'"),
    ],
)
def test_a_setting_that_cannot_be(changes, message, whole, tmp_path):
    given, arrays, words = whole["sparse"]
    write(tmp_path / "theirs", {**given, **changes}, arrays, words)
    begin = time.process_time()
    assert message in imported(tmp_path / "theirs")
    assert time.process_time() - begin < 20


def test_fewer_layers_than_there_are(whole, tmp_path):
    """A model of the first layers alone would translate, wrongly."""
    given, arrays, words = whole["dense"]
    more = {name.replace("layers.1", "layers.3"): x for name, x in arrays.items()}
    more |= {name.replace("layers.1", "layers.2"): x for name, x in arrays.items()}
    write(tmp_path / "theirs", given, {**more, **arrays, "\x1b[2J": arrays[LAYER + "fc1.bias"]},
          words)  # fmt: skip
    err = imported(tmp_path / "theirs")
    assert r"config.json has no place for 85 tensors, such as '\x1b[2J'" in err


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_numbers_are_imported(dtype, whole, tmp_path):
    given, arrays, words = whole["dense"]
    narrow = {name: x.astype(dtype) for name, x in arrays.items()}
    write(tmp_path / "theirs", given, narrow, words)
    found = named(read_checkpoint(tmp_path / "theirs"))["decoder.0.sparse.self_norm.bias"]
    name = "model.decoder.layers.1.self_attn_layer_norm.bias"
    np.testing.assert_array_equal(found, narrow[name].astype("f"))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "'' is no file of the folder"),
        ('{"weight_map": 3}', "'' is no file"),
        ('{"weight_map": {"a": 3}}', "3 is no file"),
        ('{"weight_map": {"a": {}}}', "{} is no file"),
        ('{"weight_map": {"a": "../theirs/model.safetensors"}}', "is no file of the folder"),
        ('{"weight_map": {"a": "other\\u001b[2J"}}', r"other\x1b[2J is missing"),
        ('{"weight_map": {"a": "config.json"}}', "config.json is damaged"),
        ("[" * 99_999, "nested too deeply"),
        ("", "is damaged"),
    ],
)
def test_an_index_that_is_damaged(text, message, whole, tmp_path):
    write(tmp_path / "theirs", *whole["dense"])
    (tmp_path / "theirs" / INDEX).write_text(text)
    assert message in imported(tmp_path / "theirs")


def test_a_tensor_that_two_files_have(whole, tmp_path):
    given, arrays, words = whole["dense"]
    write(tmp_path / "theirs", given, arrays, words)
    save_file({LAYER + "fc1.bias": arrays[LAYER + "fc1.bias"]}, tmp_path / "theirs" / "b")
    index = {"weight_map": {"a": "model.safetensors", "b": "b"}}
    (tmp_path / "theirs" / INDEX).write_text(json.dumps(index))
    assert "has two tensors" in imported(tmp_path / "theirs")


NAMES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
         "sentencepiece.bpe.model", "model.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_or_a_folder_in_place_of_a_file(name, whole, tmp_path):
    for kind in KINDS:
        for make in (os.mkfifo, os.mkdir):
            folder = tmp_path / f"{kind}-{make.__name__}"
            write(folder, *whole[kind])
            if not (folder / name).exists():
                continue
            (folder / name).unlink()
            make(folder / name)
            missing = name == "sentencepiece.bpe.model"  # as of a checkpoint without a tokenizer
            assert bool(imported(folder)) is not missing


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 5, 2**31, 10**6, 10**18, 10**30, 10**400]),
    st.floats(),
    st.sampled_from(["", "x", "\x1b[2J", "\ud83d", "1", "<s>", "deu_Latn", "a" * 9999]),
    st.sampled_from([[], {}, [1], ["a", 1], [["a"]], {"a": 1}, {"content": 3}, [{}]]),
)


def changed(value, data):
    """JSON with one of its values replaced, left out, or added."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(value)))
        how = data.draw(st.sampled_from(["into", "into", "gone", "odd"]))
        rest = {k: v for k, v in value.items() if k != key}
        if how == "gone":
            return rest
        if how == "odd":
            return {**value, key: data.draw(ODD)}
        return {**value, key: changed(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], changed(value[at], data), *value[at + 1 :]]
    return data.draw(ODD)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_whatever_its_json_holds(data, whole, tmp_path_factory):
    """Refused in one line, or imported with the weights that it has."""
    kind = data.draw(st.sampled_from(KINDS))
    given, arrays, words = whole[kind]
    added = {
        "additional_special_tokens": ["deu_Latn", {"content": "fra_Latn"}],
        "added_tokens_decoder": {"119": {"content": "deu_Latn"}},
    }
    if kind == "sparse" and data.draw(st.booleans()):
        words = {**words, "tokenizer_config.json": added}
    name = data.draw(st.sampled_from(["config.json", *words]))
    content = {
        "config.json": {**dataclasses.asdict(TheirSettings(given["model_type"])), **given},
        **words,
    }[name]
    damaged = changed(content, data)
    folder = tmp_path_factory.mktemp("damaged") / "theirs"
    write(folder, given, arrays, words)
    (folder / name).write_text(json.dumps(damaged))
    if imported(folder):
        return
    found = load_import(folder.parent / "theirs-out")
    layer = found.encoder[0].dense.self_attention
    weight = arrays[LAYER + "self_attn.q_proj.weight"].T
    np.testing.assert_array_equal(np.asarray(layer.wq).reshape(M, M), weight)
    assert layer.wq.shape[1] == given["encoder_attention_heads"]
    rows = np.asarray(found.source.table)
    assert rows.shape == arrays["model.shared.weight"].shape
    np.testing.assert_array_equal(rows[4:], arrays["model.shared.weight"][4:])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_shapes_and_types_its_tensors_have(data, whole, tmp_path_factory):
    """Every change of a tensor's shape, or of its type to one that is no number, is refused."""
    kind = data.draw(st.sampled_from(KINDS))
    given, arrays, words = whole[kind]
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    how = data.draw(st.sampled_from(["shape", "type", "gone", "flat", "nan", "renamed"]))
    rest = {other: x for other, x in arrays.items() if other != name}
    if how == "shape":
        axis = data.draw(st.integers(0, array.ndim - 1))
        size = data.draw(st.integers(0, 2 * array.shape[axis]).filter(array.shape[axis].__ne__))
        rest[name] = np.resize(array, [*array.shape[:axis], size, *array.shape[axis + 1 :]])
    elif how == "type":
        kinds = [np.bool_, np.int8, np.uint8, np.int64, np.uint16]
        rest[name] = array.astype(data.draw(st.sampled_from(kinds)))
    elif how == "flat":
        rest[name] = array.reshape(*array.shape, 1)
    elif how == "nan":
        rest[name] = array.copy()
        rest[name].flat[data.draw(st.integers(0, array.size - 1))] = np.nan
    elif how == "renamed":
        rest[data.draw(st.text(max_size=9).filter(lambda text: text not in arrays))] = array
    folder = tmp_path_factory.mktemp("damaged") / "theirs"
    write(folder, given, rest, words)
    assert imported(folder)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_bytes_its_files_have(data, whole, tmp_path_factory):
    """Cut, or with other bytes: an error of one line, or imported."""
    kind = data.draw(st.sampled_from(KINDS))
    folder = tmp_path_factory.mktemp("damaged") / "theirs"
    write(folder, *whole[kind])
    path = folder / data.draw(st.sampled_from([n for n in NAMES if (folder / n).exists()]))
    raw = path.read_bytes()
    at = data.draw(st.integers(0, min(len(raw), 9000) - 1))
    other = data.draw(st.binary(max_size=9))
    path.write_bytes(raw[:at] + other + raw[at + len(other) if other else len(raw) :])
    imported(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"products": "int8"},
        {"experts": 0},
        {"experts_in": "encoder", "stacked": False},
    ],
)
def test_what_is_exported_is_imported_again(changes, tmp_path):
    """Hidden dims and biases that the layout has and the model has not are zero."""
    config = models.config(key_dim=8, value_dim=8, expert_hidden_dim=20)
    config = dataclasses.replace(config, decoder_layers=4, **changes)
    model = models.model(config)
    arrays = {n: np.ascontiguousarray(a, np.float32) for n, a in exported.renamed(model)}
    save_file(arrays, tmp_path / "model.safetensors")
    exported._write(tmp_path / "config.json", exported._config(config))
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").touch()
    ours = named(model)
    for name, array in named(read_checkpoint(tmp_path)).items():
        if name.rpartition(".")[2] in ("bq", "bk", "bv", "bo", "bi"):
            assert not np.any(array), name
            continue
        stack, _, rest = name.partition(".")
        pair, _, inside = rest.partition(".")
        mine = np.asarray(ours[name] if name in ours else ours[f"{stack}.{inside}"][int(pair)])
        kept = np.asarray(array)[tuple(map(slice, mine.shape))]
        np.testing.assert_array_equal(kept, mine, name)
        assert np.count_nonzero(array) == np.count_nonzero(mine), name


def test_an_imported_model_is_not_exported():
    imported_model = models.config(key_dim=8, value_dim=8, biases=True)
    assert "was imported" in exported.inexpressible(imported_model)
    assert not exported.inexpressible(models.config(key_dim=8, value_dim=8))
