"""Models trained side by side beside each trained alone; no communication; plans and resuming."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gshard.errors import UserError
from gshard.mt.batching.batches import BatchConfig, Batches
from gshard.mt.batching.tokens import Side, some_of
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.evaluation import baselines
from gshard.mt.evaluation.baseline_group import (
    BaselineGroup,
    BaselineTraining,
    compiled_group,
    judge,
    model_of,
    read_ahead,
    stacked,
    stacked_keys,
)  # fmt: skip
from gshard.mt.evaluation.baseline_plan import (
    BaselineConfig,
    Size,
    baseline_groups,
    plan_baselines,
    set_aside,
)
from gshard.mt.evaluation.baselines import BaselineModels, read_note
from gshard.mt.evaluation.evaluate import EvaluateConfig
from gshard.mt.evaluation.scores import score
from gshard.mt.evaluation.store import held_out, tasks_of
from gshard.mt.evaluation.systems import batches_of
from gshard.nn import Batch, eval_step, train_step
from gshard.nn.strategy import ONE_DEVICE
from tests.nn import models

ROWS, LENGTHS = 4, (32, 32)
TRAINING = BaselineTraining(learning_rate=3e-3, warmup=3, dev_every=2, patience=2)
TINY = Size("tiny", 0, dropout=0.1, rows=ROWS, epochs=1000)


@pytest.fixture(scope="module")
def small(tokenizer):
    """A dense model of this tokenizer's sizes."""
    return models.config(
        source_vocab=tokenizer.source_size,
        target_vocab=tokenizer.target_size,
        experts=0,
        input_dropout=0.1,
        residual_dropout=0.1,
        attention_dropout=0.1,
    )


@pytest.fixture
def run(corpus, tokenizer, small, tmp_path):
    batch = BatchConfig(ROWS, *LENGTHS)
    return SimpleNamespace(
        folder=tmp_path,
        name="small",
        corpus=corpus,
        tokenizer=tokenizer,
        model_config=replace(small, experts=4),
        config=SimpleNamespace(batch=batch),
    )


def config(**changes):
    return BaselineConfig(steps=4, training=TRAINING, sizes=(TINY,), **changes)


def loaders(tokens):
    return [
        Batches([each], BatchConfig(ROWS, *LENGTHS, seed=i)) for i, each in enumerate(tokens[:2])
    ]


def side_by_side(config):
    """The programs for two models, compiled once for all tests."""
    return compiled_group(config, TRAINING, 2, (jax.devices()[0],))


def alone(config, batches, seed, steps, limit):
    """One model trained by itself, and its losses."""
    optimizer = TRAINING.optimizer(limit)
    key = jax.random.key(seed, impl="threefry2x32")
    state = side_by_side(config).first(stacked_keys([seed, seed]))
    state = jax.tree.map(lambda leaf: leaf[0], state.train)
    step = jax.jit(lambda *a: train_step(*a, optimizer=optimizer, label_smoothing=0.1))
    losses = []
    for n in range(steps):
        arrays = batches[n]
        state, metrics = step(state, Batch(*(arrays[name] for name in Batch._fields)), key)
        losses.append(float(metrics.nll))
    return state.model, losses


def trained(group, batches, seeds, steps, limits=100):
    """The state of models side by side, and their losses."""
    keys, limits = stacked_keys(seeds), np.broadcast_to(np.int32(limits), len(seeds))
    state, losses = group.first(keys), []
    for n in range(steps):
        state, nll = group.step(state, stacked([each[n] for each in batches]), keys, limits)
        losses.append(np.asarray(nll))
    return state, np.stack(losses, axis=1)


@pytest.mark.slow
def test_side_by_side_is_alone(small, tokens):
    batches, seeds, steps, limits = loaders(tokens), [11, 12], 4, [100, 5]
    state, together = trained(side_by_side(small), batches, seeds, steps, limits)
    assert (together[:, -1] < together[:, 0]).all()
    for i in range(2):
        model, expected = alone(small, batches[i], seeds[i], steps, limits[i])
        np.testing.assert_allclose(together[i], expected, rtol=1e-5)
        pairs = (jax.tree.leaves(m) for m in (model_of(state.train.model, i), model))
        for one, other in zip(*pairs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.slow
def test_it_does_not_matter_where_a_model_is(small, tokens):
    batches = [*loaders(tokens), loaders(tokens)[0]]
    uneven = BaselineGroup(small, TRAINING, 3, jax.devices()[:2])
    _, spread = trained(uneven, batches, [11, 12, 11], 2)
    _, together = trained(side_by_side(small), batches[:2], [11, 12], 2)
    np.testing.assert_allclose(spread[:2], together, rtol=1e-5)
    np.testing.assert_allclose(spread[2], together[0], rtol=1e-5)


@pytest.mark.slow
def test_nothing_crosses_between_devices(small, tokens):
    count = 12  # on 8 devices
    group = BaselineGroup(small, TRAINING, count, jax.devices())
    batch = stacked([loaders(tokens)[0][0]] * count)
    state, keys = group.state_like(), stacked_keys(range(count))
    nll = np.zeros(count, np.float32)
    limits = np.zeros(count, np.int32)
    step = group.step.lower(state, batch, keys, limits)
    assert step.collectives == []
    weights = step.in_shardings[0].train.model.source.table
    assert weights.tiles == (8, 1, 1)  # and each device has only its own models
    for program, arguments in (
        (group.first, (keys,)),
        (group.dev, (state.train.model, batch)),
        (group.keep_best, (state, nll, limits)),
    ):
        assert program.lower(*arguments).collectives == []


def test_the_learning_rate_falls_to_zero_at_a_models_own_end():
    def rates(steps):
        optimizer = BaselineTraining(learning_rate=1.0, warmup=4, fall=0.5).optimizer(steps)
        state, found = optimizer.init(np.zeros(())), []
        for _ in range(steps + 2):
            update, state = optimizer.update(np.ones(()), state)
            found.append(-float(update))  # Adam's of equal gradients is the rate
        return found

    short, long = rates(8), rates(16)
    np.testing.assert_allclose(short[:3], [0.25, 0.5, 0.75], rtol=1e-4)
    np.testing.assert_allclose(short[4], np.sqrt(4 / 5), rtol=1e-4)
    np.testing.assert_allclose(short[7], np.sqrt(4 / 8) / 4, rtol=1e-4)
    np.testing.assert_allclose(long[8], np.sqrt(4 / 9), rtol=1e-4)
    assert short[8:] == long[16:] == [0.0, 0.0]


def test_each_model_keeps_its_best_and_stops_by_itself(small):
    state = BaselineGroup(small, TRAINING, 3).state_like()
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    state = state._replace(best_nll=np.full(3, np.inf), running=np.ones(3, bool))
    nlls = np.array(
        [  # the first gets worse, the second better, the third is not a number at the end
            [5.0, 4.0, 3.0],
            [6.0, 3.0, 2.0],
            [4.9, 3.5, np.nan],
            [1.0, 2.0, np.nan],
            [1.0, 2.5, 1.0],
        ],
        np.float32,
    )
    limits = np.array([100, 5, 100], np.int32)
    best, chosen = np.full(3, np.inf), np.zeros(3)
    waited, running = np.zeros(3), np.ones(3, bool)
    for step, nll in enumerate(nlls, 1):
        # Weights that tell when they were current.
        model = jax.tree.map(lambda leaf: np.full_like(leaf, step), state.train.model)  # noqa: B023
        train = state.train._replace(model=model, step=np.full(3, step, np.int32))
        state = judge(state._replace(train=train), nll, limits, patience=2)
        for i in range(3):
            if running[i] and nll[i] < best[i]:
                best[i], chosen[i], waited[i] = nll[i], step, 0
            else:
                waited[i] += 1
            running[i] &= waited[i] < 2 and step < limits[i]
        np.testing.assert_array_equal(state.best_nll, best.astype(np.float32))
        np.testing.assert_array_equal(state.best_step, chosen)
        np.testing.assert_array_equal(state.running, running)
    assert list(chosen) == [4, 4, 2]
    for leaf in jax.tree.leaves(state.best):
        np.testing.assert_array_equal(leaf.reshape(3, -1)[:, 0], chosen)


@pytest.mark.slow
def test_the_dev_loss_counts_every_token_once(small, tokens):
    group = side_by_side(small)
    state = group.first(stacked_keys([1, 2]))
    texts = [some_of(each, np.arange(n)) for each, n in zip(tokens[:2], (9, 2), strict=True)]
    dev = [batches_of(text, ROWS, *LENGTHS, least=1) for text in texts]
    loss = jax.jit(eval_step)
    seen = []
    done = group.train(loaders(tokens)[:2], dev, [1, 2], [2, 2], state, lambda *a: seen.append(a))
    assert len(seen) == 1
    for i, text in enumerate(texts):
        total = count = 0
        model = model_of(done.train.model, i)
        for n in range(len(text)):
            (arrays,) = batches_of(some_of(text, np.array([n])), 1, *LENGTHS)
            metrics = loss(model, Batch(*(arrays[name] for name in Batch._fields)))
            total += float(metrics.nll * metrics.tokens)
            count += float(metrics.tokens)
        assert count == text.target.lengths.sum()
        assert float(done.best_nll[i]) == pytest.approx(total / count, rel=1e-4)


def test_sizes_go_by_the_data(run):
    tasks = tasks_of(run.tokenizer)
    sizes = (replace(TINY, name="much", pairs=200), TINY)
    found = plan_baselines(run, tasks, BaselineConfig(steps=7, sizes=sizes))
    assert all(p.size.name == ("much" if len(p.train) >= 200 else "tiny") for p in found)
    assert [len(p.train) for p in found] == sorted((len(p.train) for p in found), reverse=True)
    assert all(p.limit <= 7 for p in found)
    assert all(p.model.experts == 0 for p in found)
    assert len({p.seed for p in found}) == len(found)
    groups = baseline_groups(found, lambda baseline: 2)
    assert [p for group in groups for p in group] == found
    assert all(len(group) <= 2 for group in groups)


def test_a_task_without_dev_text_sets_some_of_its_own_aside(tokens):
    train, dev = set_aside(tokens[0])
    assert len(train) + len(dev) == len(tokens[0])
    assert len(dev) == len(tokens[0]) // 20
    pairs = [
        sorted((tuple(t.source[i]), tuple(t.target[i])) for t in texts for i in range(len(t)))
        for texts in ((train, dev), (tokens[0],))
    ]
    assert pairs[0] == pairs[1]
    one = set_aside(some_of(tokens[0], np.arange(1)))
    assert [len(part) for part in one] == [1, 1]


def test_what_is_set_aside_is_trained_on_in_no_other_pieces(tokens):
    once = tokens[0]
    twice = replace(
        once,
        source=Side(once.source.ids, once.source.ends, 2),
        target=Side(once.target.ids, once.target.ends, 2),
        english_words=np.tile(once.english_words, 2),
    )
    train, dev = set_aside(twice)
    assert (len(train), len(dev)) == (2 * len(set_aside(once)[0]), len(set_aside(once)[1]))
    known = {tuple(train.source[i]) for i in range(len(train))}
    assert not known & {tuple(dev.source[i]) for i in range(len(dev))}


class Upper:
    """Says the source in capitals."""

    def __init__(self, asked):
        self.asked = asked

    def translate(self, texts, target="en"):
        self.asked += texts
        return [[SimpleNamespace(text=text.upper(), score=-1.0)] for text in texts]


@pytest.mark.slow
def test_from_training_to_the_file(run, monkeypatch):
    asked, trained = [], []
    monkeypatch.setattr(BaselineModels, "opened", lambda *_: Upper(asked))
    whole = BaselineGroup.train
    monkeypatch.setattr(BaselineGroup, "train", lambda *a: trained.append(a[0].count) or whole(*a))
    evaluation = EvaluateConfig(languages=("ru",), sentences=5)

    def measure(settings=config()):  # noqa: B008
        return BaselineModels(run, settings).measure(evaluation)

    found = measure()
    assert found == json.loads((run.folder / "baselines.json").read_text())
    sets = held_out(run.corpus, tasks_of(run.tokenizer, ("ru",)), "test", 5)
    assert set(found["tasks"]) == {str(held.task) for held in sets}
    for held in sets:
        task = found["tasks"][str(held.task)]
        expected = score([s.upper() for s in held.sources], held.references, held.task.target)
        assert (task["bleu"], task["chrf"]) == (expected.bleu, expected.chrf)
        assert task["size"] == "tiny"
        assert task["steps"] in (2, 4)
        assert task["weights"] > 1000
    assert trained == [2]
    said = len(asked)
    again = measure()  # nothing is trained or translated twice
    assert (trained, len(asked)) == ([2], said)
    assert {**again, "seconds": 0} == {**found, "seconds": 0}
    measure(config(seed=1))
    assert trained == [2, 2]


@pytest.mark.slow
def test_an_interrupted_group_goes_on(run):
    wanted = plan_baselines(run, tasks_of(run.tokenizer, ["ru"]), config())
    BaselineModels(run, config()).train(wanted)
    expected = [baselines.read_model(run.folder, baseline) for baseline in wanted]
    run.folder = run.folder / "other"
    settings = config(save_seconds=0.0)

    class StopAfterOneMeasurement:
        def stage(self, name, total):
            def step(note="", count=1):
                if "step 4" in note:
                    raise KeyboardInterrupt

            return step

    with pytest.raises(KeyboardInterrupt):
        BaselineModels(run, settings).train(wanted, StopAfterOneMeasurement())
    assert len(list(run.folder.glob("baselines/unfinished-*.npz"))) == 1
    notes = []
    BaselineModels(run, settings).train(wanted, SimpleNamespace(stage=lambda *a: notes.append))
    assert len(notes) == 1  # only the second measurement was left
    assert not list(run.folder.glob("baselines/unfinished-*.npz"))
    for baseline, model in zip(wanted, expected, strict=True):
        found = baselines.read_model(run.folder, baseline)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_damaged_or_foreign_baseline_is_trained_again(run):
    (wanted, *_) = plan_baselines(run, tasks_of(run.tokenizer, ["ru"]), config())
    place = run.folder / "baselines" / str(wanted.task)
    place.mkdir(parents=True)
    (place / "note.json").write_text("{")
    assert read_note(run.folder, wanted) is None
    (place / "note.json").write_text(json.dumps({"digest": "of another"}))
    assert read_note(run.folder, wanted) is None
    (place / "note.json").write_text(json.dumps({"digest": wanted.digest}))
    (place / "weights.npz").write_bytes(b"PK no")
    with pytest.raises(UserError, match=r"ru.* is damaged; remove it"):
        baselines.read_model(run.folder, wanted)


@pytest.mark.slow
def test_translators_share_programs_and_not_weights(small, tokenizer, corpus):
    settings = TranslateConfig(beam=2, rows=3, longest=24, most=8)
    texts = [english for _, english in corpus.pairs("de", "test")][:3]
    programs, said = {}, []
    for seed in range(2):
        model = models.model(small, seed)
        shared = Translator(model, tokenizer, ONE_DEVICE, settings, programs)
        said.append(shared.translate(texts, "de"))
        compiled = len(programs)
    assert said[1] == Translator(model, tokenizer, ONE_DEVICE, settings).translate(texts, "de")
    assert said[0] != said[1]
    assert len(programs) == compiled == 1


@pytest.mark.slow
def test_processes_make_the_batches_that_a_thread_makes(tokens):
    """Each worker maps the tokens' files for itself and makes whole steps, in order."""
    batches = [Batches([each], BatchConfig(4, 48, 40, seed=n)) for n, each in enumerate(tokens)]
    for step in (0, 7):
        thread, processes = (read_ahead(batches, step, workers) for workers in (0, 2))
        for _ in range(6):
            for one, other in zip(next(thread), next(processes), strict=True):
                np.testing.assert_array_equal(one, other)
        thread.close()
        processes.close()
