"""`gshard.pipeline` says in one line what is wrong with what it was given."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from tests.pipelining.programs import dense, loss_of, make_dense

WEIGHTS, X, TARGETS = make_dense(layers=4, batch=8)


def call(weights=WEIGHTS, x=X, block=dense, head=loss_of, targets=TARGETS, **settings):
    settings = {"stages": 2, "microbatches": 4, **settings}
    return gshard.pipeline(block, weights, x, head=head, targets=targets, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stages": 8, "microbatches": 8}, "4 layers cannot be in 8 parts"),
        ({"schedule": "zbv", "stages": 3}, "4 layers cannot be in 6 parts"),
        ({"microbatches": 3}, "the 8 rows of x do not divide into 3 microbatches"),
        ({"microbatches": 0}, "microbatches=0: allowed are numbers from 1"),
        (
            {"microbatches": "many"},
            "microbatches='many': allowed are numbers from 1 on, and 'auto'",
        ),
        ({"stages": 0}, "stages=0: allowed are numbers from 1"),
        ({"stages": 2.0}, "stages=2.0: allowed are numbers from 1 on, and"),
        ({"block": lambda w, x: x[:1]}, r"block returns float32\[1,8\], but takes float32\[2,8\]"),
        ({"head": lambda y, t: y - t}, r"head returns float32\[2,8\]; allowed are scalars"),
        ({"schedule": "2f2b"}, "allowed are 'gpipe', '1f1b'"),
        ({"schedule": None}, "schedule=None: allowed are 'gpipe', '1f1b'"),
        ({"schedule": "F0 . B0 W0\n. . . ."}, "never does F0 of stage 1"),
        (
            {"schedule": "F0 .  .  B0 W0\n.  F0 B0 W0 ."},
            "for 2 stages and 1 microbatches, not for 2 an",
        ),
        ({"x": None}, "x have the shapes none: the leading dim of all has to be the batch"),
        ({"head": None}, "targets are given, and no head that reads them"),
        ({"targets": TARGETS[:4]}, "x has 8 rows, and targets have 4: a batch has one"),
        ({"weights": {**WEIGHTS, "in": WEIGHTS["in"][:3]}}, "the leading dim of all has to be the"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(settings, said):
    with pytest.raises(ValueError, match=said) as error:
        call(**settings)
    assert "test_api.py:" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_error_of_the_block_has_its_own_lines():
    def block(w, x):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match=r"test_api.py:\d+: gshard.pipeline: no such lay") as error:
        call(block=block)
    assert [entry.name for entry in error.traceback][-1] == "block"


def test_a_block_and_a_head_without_a_derivative_run_forward():
    """A loop whose length is data: gradients are refused as `jax.grad` refuses them."""

    def grown(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 5, lambda c: 2 * jnp.abs(c) + 1, x)

    def loss(weights):
        return call(
            weights, block=lambda w, x: grown(dense(w, x)), head=lambda y, t: grown(y)[0, 0]
        )

    for run in (jax.jit(loss), gshard.jit(loss, devices=jax.devices()[:4])):
        assert run(WEIGHTS) == pytest.approx(float(loss(WEIGHTS)), rel=1e-5)
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(run)(WEIGHTS)


def test_stages_divide_the_devices_and_annotations_are_within_a_stage():
    with pytest.raises(ValueError, match="3 stages on 8 devices; allowed are divisors of 8"):
        gshard.jit(lambda: call(stages=3)).lower()

    def wide(w, x):
        return gshard.split(dense(w, x), 1, 8)

    with pytest.raises(ValueError, match="over devices of several stages; a stage has 4 of the 8"):
        gshard.jit(lambda: call(block=wide)).lower()


def test_targets_have_no_gradient():
    with pytest.raises(ValueError, match="targets have no gradient"):
        jax.grad(lambda targets: call(targets=targets))(TARGETS)


def test_what_has_no_gradient_is_left_alone():
    def loss(weights, x):
        return call(weights, x, head=lambda y, t: jnp.sum(jax.lax.stop_gradient(y)))

    grads = jax.jit(jax.grad(loss, (0, 1)))(WEIGHTS, X)
    assert all(not g.any() for g in jax.tree.leaves(grads))


def test_a_head_may_look_its_labels_up():
    """The constants of passes over its gradient are made while the program is traced."""
    labels = jnp.arange(8) % 8

    def head(y, label):
        found = jnp.take_along_axis(jax.nn.log_softmax(y), label[:, None], -1)
        return -found.take(0, axis=-1).sum()  # as Optax's cross-entropy has it

    fn = jax.grad(lambda weights: call(weights=weights, head=head, targets=labels))
    assert gshard.jit(fn).lower(WEIGHTS).pipelines[0].stages == 2
