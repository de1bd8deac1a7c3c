"""The search on a CPU beside the compiled one: equal in float32, near in 8 bits."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.errors import UserError
from gshard.mt.batching.tokenizer import PAD
from gshard.mt.decoding.engines import EngineConfig, engine_of, open_translator
from gshard.mt.decoding.host.layers import choices
from gshard.mt.decoding.host.products import OnnxGraph, OnnxOutput
from gshard.mt.decoding.host.translator import HostModel, host_search
from gshard.mt.decoding.on_device import beam_search
from gshard.mt.decoding.search import BeamConfig
from gshard.mt.decoding.texts import TranslateConfig, routes
from gshard.mt.release.make import make_release, verify
from gshard.mt.run import Run
from gshard.mt.training.weights import named, summed_axes
from gshard.nn.config import GatingConfig, Int8
from gshard.nn.gating import route
from tests.mt.decoding.test_on_device import ending
from tests.mt.runs import make_run
from tests.nn import models


def host_model(model):
    arrays = {name: np.asarray(leaf) for name, leaf in named(model).items()}
    return HostModel(model.config, arrays.__getitem__)


def sentences(count, length, seed):
    rng = np.random.default_rng(seed)
    source = rng.integers(4, 12, (count, length)).astype(np.int32)
    for row, tokens in zip(source, rng.integers(0, length + 1, count), strict=True):
        row[tokens:] = PAD  # some have nothing at all
    return source


def check(model, source, config):
    want = jax.jit(lambda m, s: beam_search(m, s, config))(model, source)
    found = host_search(host_model(model), source, config)
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_array_equal(found.lengths, want.lengths)
    np.testing.assert_allclose(found.scores, want.scores, rtol=1e-4, atol=1e-5)
    assert found.steps == want.steps


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": 4, "stacked": False},
        pytest.param({"experts": 0}, marks=pytest.mark.slow),
        pytest.param({"experts": 4, "experts_in": "encoder"}, marks=pytest.mark.slow),
        pytest.param({"experts": 4, "shared_hidden_dim": 6}, marks=pytest.mark.slow),
        pytest.param({"experts": 4, "gating": GatingConfig(top_k=1)}, marks=pytest.mark.slow),
        pytest.param({"experts": 4, "key_dim": 3, "value_dim": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equal_to_the_compiled_search(changes):
    config = BeamConfig(beam=4, nbest=3, max_length=7)
    model = models.model(models.config(target_vocab=9, **changes))
    check(model, sentences(6, 5, 0), config)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    beam=st.integers(1, 5),
    length=st.integers(1, 9),
    alpha=st.sampled_from([0.0, 0.6, 2.0]),
    vocab=st.integers(5, 30),
    experts=st.sampled_from([0, 4]),
    strength=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_equal_to_the_compiled_search_at_any_size(
    beam, length, alpha, vocab, experts, strength, seed
):
    """With a likely end sentences are done at different steps, and leave the batch."""
    config = BeamConfig(beam=beam, nbest=beam, max_length=length, alpha=alpha)
    model = models.model(models.config(target_vocab=vocab, experts=experts), seed)
    check(ending(model, strength) if strength else model, sentences(5, 6, seed), config)


def test_sentences_of_different_largest_lengths_share_a_batch():
    model = host_model(models.model(models.config(target_vocab=9, experts=4)))
    source, most = sentences(5, 6, 3), np.array([7, 2, 4, 1, 7])
    config = BeamConfig(beam=3, nbest=2, max_length=7)
    found = host_search(model, source, config, most)
    for n, length in enumerate(most.tolist()):
        alone = host_search(
            model, source[n : n + 1], dataclasses.replace(config, max_length=length)
        )
        np.testing.assert_array_equal(found.tokens[n, :, :length], alone.tokens[0])
        np.testing.assert_array_equal(found.lengths[n], alone.lengths[0])
        np.testing.assert_allclose(found.scores[n], alone.scores[0], rtol=1e-5)
        assert (found.tokens[n, :, length:] == PAD).all()


def test_onnx_runtime_writes_nothing_about_its_user(tmp_path):
    """Neither a device's id nor a queue of events, which it writes when it is imported."""
    script = (
        "import numpy as np\n"
        "from gshard.mt.decoding.host.products import OnnxGraph\n"
        "graph = OnnxGraph()\n"
        "print(graph.compile(graph.add('Abs', graph.input('x')))(-np.ones((1, 1), np.float32)))\n"
    )
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TMPDIR"), str(tmp_path))
    given = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"} | places
    done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True)
    assert (done.returncode, "1." in done.stdout) == (0, True), done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_routers_choose_alike():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((7, 5)).astype(np.float32)
    for top_k in (1, 2):
        gating = GatingConfig(top_k=top_k)
        want = jax.jit(lambda x, gating=gating: route(x, 7, gating)[0])(logits[None])
        graph = OnnxGraph()
        expert, weight = choices(graph, graph.input("logits"), top_k)
        expert, weight = graph.compile(OnnxOutput(expert, "int64"), weight)(logits)
        np.testing.assert_array_equal(expert.T, want.expert[:, 0])
        np.testing.assert_allclose(weight.T, want.weight[:, 0], rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 9),
    depth=st.integers(1, 70),
    columns=st.integers(1, 40),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_a_product_in_eight_bits_is_the_exact_sum_of_its_integers(rows, depth, columns, size, seed):
    """The oracle rounds rows and weights in float64, and sums integers."""
    rng = np.random.default_rng(seed)
    x = (size * rng.standard_normal((rows, depth))).astype(np.float32)
    x[0] = 0.0
    weight = Int8.of(rng.standard_normal((depth, columns)), (-2,))
    assert np.abs(weight.values).max() <= 127
    graph = OnnxGraph()
    (found,) = graph.compile(graph.product(graph.input("x"), weight))(x)
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    near = np.rint(x / np.where(scale > 0, scale, 1)).astype(np.int64)
    want = (near @ weight.values.astype(np.int64)) * scale * weight.scale
    # A value in the middle between two integers may be rounded to either.
    close = 1e-4 * np.abs(want).max() + (scale * weight.scale) * 127
    assert (np.abs(found - want) <= close).all()
    assert (found[0] == 0).all()
    alone = [graph.compile(graph.product("x", weight))(row[None])[0][0] for row in x]
    np.testing.assert_allclose(found, alone, rtol=1e-6)  # whatever is beside it


def test_every_product_has_8_bits_and_nothing_else_has():
    model = models.model(models.config(experts=4))
    kept = {name for name in named(model) if summed_axes(name) is None}
    assert {name.rsplit(".", 1)[1] for name in kept} == {"scale", "bias", "gate"}
    for name, leaf in named(model).items():
        if axes := summed_axes(name):
            found = Int8.of(np.asarray(leaf), axes)
            error = np.abs(found.astype(np.float32) - np.asarray(leaf))
            assert (error <= found.scale / 2 * 1.0001).all()
            assert found.values.shape == leaf.shape


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    return make_run(tmp_path_factory.mktemp("run") / "run", tokenizer)


TEXTS = ["one two three", "four", "", "five six one two"]
SEARCH = TranslateConfig(beam=3, nbest=2, rows=3, longest=24, most=12)


def test_a_release_in_8_bits_is_small_and_translates(run, tmp_path):
    folder = make_release(run, tmp_path / "small", precision="int8")
    large = make_release(run, tmp_path / "large", precision="float32")
    weights = "weights.safetensors"
    assert (folder / weights).stat().st_size < 0.45 * (large / weights).stat().st_size
    assert verify(Run.open(folder)) == verify(Run.open(large))
    own, floats = translated(folder, EngineConfig(), EngineConfig(numbers="float32"))
    scores = [(a[0].score, b[0].score) for a, b in zip(own, floats, strict=True)]
    np.testing.assert_allclose(*zip(*scores, strict=True), rtol=0.15)


def translated(folder, *engines, devices=0):
    for engine in engines:
        run = Run.open(folder)
        translator, _ = open_translator(run, config=SEARCH, devices=devices, engine=engine)
        yield translator.translate(TEXTS, "de")


@pytest.mark.slow
def test_xla_reads_a_release_in_8_bits(run, tmp_path):
    folder = make_release(run, tmp_path / "small", precision="int8")
    floats, compiled, int8 = translated(
        folder,
        EngineConfig(numbers="float32"),
        EngineConfig("xla"),
        EngineConfig("xla", "int8"),
        devices=1,
    )
    for mine, *others in zip(floats, compiled, int8, strict=True):  # the same rounded weights
        for other in others:
            assert [h.text for h in mine] == [h.text for h in other]
            np.testing.assert_allclose([h.score for h in mine], [h.score for h in other], rtol=1e-3)


@pytest.mark.slow
def test_the_same_experts_as_the_compiled_model(run):
    both = []
    for engine in (EngineConfig("onnx"), EngineConfig("xla")):
        translator, _ = open_translator(run, config=SEARCH, engine=engine)
        ((best, *_),) = translator.translate(TEXTS[:1], "de")
        both.append(routes(translator, TEXTS[0], best, "de"))
    for mine, other in zip(*(each["source"] + each["output"] for each in both), strict=True):
        assert mine["piece"] == other["piece"]
        assert len(mine["layers"]) == len(other["layers"]) > 0
        for a, b in zip(mine["layers"], other["layers"], strict=True):
            assert [expert for expert, _ in a] == [expert for expert, _ in b]
            np.testing.assert_allclose(a, b, rtol=1e-4)


def test_errors_name_what_is_allowed(run):
    with pytest.raises(
        UserError, match=r"'onx'; did you mean 'onnx'\?; allowed are auto, onnx, xla"
    ):
        engine_of("onx", "", 0)
    with pytest.raises(UserError, match="allowed are float32, int8"):
        engine_of("auto", "int4", 0)
    with pytest.raises(UserError, match="one device, and --devices is 2"):
        open_translator(run, devices=2, engine=EngineConfig("onnx"))
    with pytest.raises(UserError, match="int8 is for one device, and there are 8; --devices 1"):
        open_translator(run, engine=EngineConfig("xla", "int8"))
    with pytest.raises(UserError, match="float32 is for --engine onnx; --engine xla has int8"):
        open_translator(run, devices=1, engine=EngineConfig("xla", "float32"))


def test_a_scale_that_does_not_belong_is_refused(run, tmp_path):
    from gshard.mt.training.weights import WeightsFile, write_weights

    path = tmp_path / "weights.safetensors"
    one = Int8(np.ones((3, 4), np.int8), np.ones((1, 4), np.float32))
    write_weights(path, {"a": one, "b": np.zeros(2, np.float32)}, {})
    assert WeightsFile(path).shapes == {"a": (3, 4), "b": (2,)}
    np.testing.assert_array_equal(WeightsFile(path).part("a", (slice(1, 2), slice(2, 4))), [[1, 1]])
    write_weights(path, {"a": dataclasses.replace(one, scale=np.ones(3, np.float32))}, {})
    with pytest.raises(UserError, match="a and its scale"):
        WeightsFile(path)
    write_weights(path, {"a": np.ones(3, np.int8)}, {})
    with pytest.raises(UserError, match="a and its scale"):
        WeightsFile(path)
