import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.nn.config import GatingConfig
from gshard.nn.gating import route
from tests.nn.gating_oracle import best_second, gate_group

CONFIGS = [GatingConfig(), GatingConfig(second_expert="all"), GatingConfig(top_k=1)]
jit_route = jax.jit(route, static_argnums=2)  # the capacity stays dynamic: fewer compilations


def scattered(routing, values_KGS, E, C):
    """The values at [group, token, expert, slot], by a loop."""
    K, G, S = routing.expert.shape
    out = np.zeros((G, S, E, C))
    for k, g, s in np.ndindex(K, G, S):
        if routing.kept[k, g, s]:
            out[g, s, routing.expert[k, g, s], routing.slot[k, g, s]] += values_KGS[k, g, s]
    return out


@st.composite
def problems(draw):
    G, S, E = draw(st.sampled_from([(1, 1, 2), (2, 7, 3), (3, 11, 5)]))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(G, S, E)).astype(np.float32) * draw(st.sampled_from([0.1, 1.0, 30.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties, also between first and second
    real = rng.random((G, S)) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    capacity = draw(st.integers(1, S))
    config = draw(st.sampled_from(CONFIGS))
    return logits, real, capacity, config, seed


def assert_equals_the_papers_loop(problem):
    logits, real, capacity, config, seed = problem
    G, S, E = logits.shape
    key = jax.random.key(seed)
    routing, metrics = jax.device_get(jit_route(logits, capacity, config, key, real))
    gates = np.asarray(jax.nn.softmax(jnp.asarray(logits)))
    uniform = np.asarray(jax.random.uniform(jax.random.split(key)[0], (G, S)))

    expected = np.zeros((G, S, E, capacity))
    taken_GS = np.zeros((G, S), int)
    totals = np.zeros(4)
    load = np.zeros(E)
    auxes = []
    for g in range(G):
        taken, count, overflow, asked, aux = gate_group(
            gates[g],
            best_second(gates[g]),
            uniform[g],
            real[g],
            capacity,
            top_k=config.top_k,
            policy=config.second_expert,
        )
        for (s, e, c), weight in taken.items():
            expected[g, s, e, c] = weight
            taken_GS[g, s] += 1
        totals += [*overflow, *asked]
        load += count
        if real[g].any():
            auxes.append(aux * E * E)
    got = scattered(routing, routing.weight, E, capacity)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(routing.kept.sum(0), taken_GS)
    assert (routing.weight[~routing.kept] == 0).all()

    n = max(real.sum(), 1)
    np.testing.assert_allclose(metrics.aux_loss, np.mean(auxes) if auxes else 0.0, rtol=1e-5)
    np.testing.assert_allclose(metrics.overflow_first, totals[0] / n, rtol=1e-6)
    np.testing.assert_allclose(metrics.overflow_second, totals[1] / max(totals[3], 1), rtol=1e-6)
    for k, got_share in enumerate([metrics.tokens_0, metrics.tokens_1, metrics.tokens_2]):
        np.testing.assert_allclose(got_share, (taken_GS[real] == k).sum() / n, rtol=1e-6)
    np.testing.assert_allclose(metrics.load, load / max(load.sum(), 1), rtol=1e-6)
    assert metrics.dead_experts == (load == 0).sum()


@given(problems())
def test_equals_the_papers_loop(problem):
    assert_equals_the_papers_loop(problem)


@pytest.mark.slow
@settings(max_examples=80)
@given(problems())
def test_equals_the_papers_loop_at_length(problem):
    assert_equals_the_papers_loop(problem)


def test_slots_are_shared_by_nobody_and_bounded():
    key = jax.random.key(0)
    logits = np.random.default_rng(0).normal(size=(4, 64, 8)) * 3
    routing, _ = jit_route(logits, 9, GatingConfig(second_expert="all"), key)
    mask = scattered(routing, routing.kept, 8, 9)
    assert mask.sum(1).max() == 1
    assert mask.sum((2, 3)).max() == 2


def test_rejected_second_choices_take_no_slot():
    # Token 0 has g2 ~ 0 and is always rejected; token 1 must then get the single slot of expert 1.
    logits = jnp.array([[[40.0, 0.0, -40.0], [0.0, -0.01, -40.0]]])
    routing, _ = jit_route(logits, 1, GatingConfig(), jax.random.key(3))
    assert not routing.kept[1, 0, 0]
    uniform = jax.random.uniform(jax.random.split(jax.random.key(3))[0], (1, 2))
    assert uniform[0, 1] < 0.99
    assert routing.kept[1, 0, 1]
    assert routing.slot[1, 0, 1] == 0


def test_second_choices_queue_behind_kept_first_choices_only():
    # Expert 0: three first choices for two slots. Expert 1: no first choice, so slot 0 is free.
    logits = jnp.array([[[2.0, 1.0, 0.0]] * 3])
    routing, metrics = jit_route(logits, 2, GatingConfig(second_expert="all"))
    np.testing.assert_array_equal(routing.kept[:, 0], [[1, 1, 0], [1, 1, 0]])
    np.testing.assert_array_equal(routing.slot[1, 0], [0, 1, 2])
    np.testing.assert_allclose(metrics.overflow_first, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics.tokens_0, 1 / 3, rtol=1e-6)


def test_random_policy_keeps_with_probability_twice_g2():
    g2 = 0.2
    logits = jnp.broadcast_to(jnp.log(jnp.array([1 - g2, g2])), (1, 20_000, 2))
    routing, _ = jit_route(logits, 20_000, GatingConfig(), jax.random.key(0))
    np.testing.assert_allclose(jnp.mean(routing.kept[1]), 2 * g2, atol=0.015)


@pytest.mark.slow
def test_sampling_policy_draws_from_the_remaining_gates():
    gates = jnp.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(gates), (1, 20_000, 4))
    config = GatingConfig(second_expert="sampling")
    routing, _ = jit_route(logits, 20_000, config, jax.random.key(0))
    share = np.bincount(np.asarray(routing.expert[1, 0]), minlength=4) / 20_000
    np.testing.assert_allclose(share, [0, 0.6, 0.3, 0.1], atol=0.015)
    without_key, _ = jit_route(logits, 20_000, config)
    assert (without_key.expert[1] == 1).all()


def test_padding_changes_nothing():
    key = jax.random.key(1)
    logits = jax.random.normal(key, (2, 12, 4))
    config = GatingConfig(second_expert="all")
    plain, metrics = jit_route(logits, 5, config)
    # Padding between the tokens and two groups of nothing else, with absurd logits.
    padded = np.full((4, 24, 4), 1e4)
    padded[:2, ::2] = logits
    mask = np.zeros((4, 24), bool)
    mask[:2, ::2] = True
    routing, padded_metrics = jit_route(padded, 5, config, None, mask)
    for got, want in zip(routing, plain, strict=True):
        np.testing.assert_array_equal(got[:, :2, ::2], want)
    assert not routing.kept[:, ~mask].any()
    for got, want in zip(padded_metrics, metrics, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_losses_of_known_routers():
    E = 4
    balanced = jnp.log(jnp.eye(E) * 10 + 1e-6)[None]
    _, metrics = jit_route(balanced, 1, GatingConfig(second_expert="all"))
    np.testing.assert_allclose(metrics.aux_loss, 1.0, rtol=1e-3)
    np.testing.assert_allclose(metrics.z_loss, np.log(10 + E * 1e-6) ** 2, rtol=1e-3)
    collapsed = np.full((1, 8, E), -50.0)
    collapsed[..., 2] = 50.0
    _, metrics = jit_route(collapsed, 8, GatingConfig(second_expert="random"), jax.random.key(0))
    np.testing.assert_allclose(metrics.aux_loss, E, rtol=1e-5)
    np.testing.assert_allclose(metrics.dead_experts, E - 1)
    np.testing.assert_allclose(metrics.entropy, 0.0, atol=1e-5)
    _, metrics = jit_route(jnp.zeros((1, 8, E)), 8, GatingConfig(second_expert="all"))
    np.testing.assert_allclose(metrics.entropy, np.log(E), rtol=1e-5)


def test_aux_loss_pushes_towards_balance():
    logits = jax.random.normal(jax.random.key(0), (2, 64, 4)).at[..., 1].add(2.0)

    def aux(logits):
        return route(logits, 8, GatingConfig())[1].aux_loss

    gradient = jnp.mean(jax.jit(jax.grad(aux))(logits), axis=(0, 1))
    assert gradient[1] > 0
    assert (gradient[jnp.array([0, 2, 3])] < 0).all()


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "minimum", "want"),
    [(2048, 2048, 2.0, 1, 2), (8192, 128, 2.0, 1, 128), (10, 7, 2.0, 1, 2), (10, 64, 2.0, 4, 4),
     (3, 2, 4.0, 1, 3)],
)  # fmt: skip
def test_capacity(tokens, experts, factor, minimum, want):
    config = GatingConfig(capacity_factor=factor, min_capacity=minimum, eval_capacity_factor=1e9)
    assert config.capacity(tokens, experts, train=True) == want
    assert config.capacity(tokens, experts, train=False) == tokens
    assert config.capacity(tokens, experts, train=True, dropless=True) == tokens


def test_one_expert_is_not_enough_for_top_2():
    with pytest.raises(ValueError, match="at least 2 experts, got 1"):
        route(jnp.zeros((1, 4, 1)), 4, GatingConfig())


def test_router_is_float32_and_deterministic():
    logits = jax.random.normal(jax.random.key(0), (2, 16, 4), jnp.bfloat16)
    one, metrics = jit_route(logits, 4, GatingConfig(), jax.random.key(7))
    two, _ = jax.jit(route, static_argnums=(1, 2))(logits, 4, GatingConfig(), jax.random.key(7))
    assert one.weight.dtype == metrics.aux_loss.dtype == jnp.float32
    np.testing.assert_array_equal(one.kept, two.kept)
    np.testing.assert_array_equal(one.slot, two.slot)
