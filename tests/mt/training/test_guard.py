"""The loss guard: what it leaves out, against a plain Python account of the same rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.mt.training.programs import Guard, advice, choose

SPIKE = 6.0


def account(losses, norms, spike=SPIKE):
    """The rule in words: a mean and a mean deviation over the good losses, forgetting slowly."""
    mean = deviation = 0.0
    seen = skipped = row = 0
    verdicts = []
    for loss, norm in zip(losses, norms, strict=True):
        width = max(deviation, 0.02 * abs(mean))
        good = bool(np.isfinite(loss) and np.isfinite(norm))
        good = good and (seen < 50 or loss <= mean + spike * width)
        if good:
            memory = min(0.98, seen / (seen + 1))
            mean = memory * mean + (1 - memory) * loss
            deviation = memory * deviation + (1 - memory) * abs(loss - mean)
            seen, row = seen + 1, 0
        else:
            skipped, row = skipped + 1, row + 1
        verdicts.append((good, skipped, row))
    return verdicts


@jax.jit
def judged(losses, norms):
    def step(guard, x):
        guard, good = guard.judge(*x, SPIKE)
        return guard, (good, guard.skipped, guard.in_a_row)

    return jax.lax.scan(step, Guard.new(), (losses, norms))[1]


strange = st.sampled_from([np.nan, np.inf, -np.inf, 30.0, 1e30])


@given(
    st.lists(st.one_of(st.floats(2.0, 2.5), strange), min_size=20, max_size=20),
    st.lists(st.one_of(st.floats(0, 9), st.sampled_from([np.nan, np.inf])), min_size=5, max_size=5),
)
def test_it_judges_as_the_account_does(late, norms):
    losses = [9.0 - 0.1 * n for n in range(60)] + late  # a falling curve, then anything
    norms = [1.0] * 75 + norms
    found = judged(jnp.array(losses, jnp.float32), jnp.array(norms, jnp.float32))
    expected = account(np.float32(losses).tolist(), np.float32(norms).tolist())
    assert [tuple(map(int, row)) for row in zip(*found, strict=True)] == [
        tuple(map(int, row)) for row in expected
    ]


def test_a_spike_is_left_out_and_a_plateau_is_not():
    calm = [3.0 + 0.05 * (-1) ** n for n in range(80)]
    found = account([*calm, 9.0, 3.0, 3.2], [1.0] * 83)
    assert [good for good, _, _ in found[-3:]] == [False, True, True]
    device = judged(jnp.array([*calm, 9.0, 3.0, 3.2]), jnp.ones(83))
    assert device[0].tolist()[-3:] == [False, True, True]


def test_choosing_keeps_the_old_bits():
    old = {"w": jnp.array([1.0, 2.0]), "n": jnp.array(3)}
    new = {"w": jnp.array([jnp.nan, 5.0]), "n": jnp.array(4)}
    kept = choose(jnp.array(False), new, old)
    np.testing.assert_array_equal(kept["w"], old["w"])
    assert int(choose(jnp.array(True), new, old)["n"]) == 4


@pytest.mark.parametrize("word", ["learning_rate", "20 updates", "nan", "checkpoint"])
def test_the_advice_says_what_to_do(word):
    assert word in advice(20, float("nan"), 1.0)
