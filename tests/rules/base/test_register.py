"""Third parties teach gshard their primitives, by strings like an einsum's or in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import extend
from gshard.rules.base.rule import REGIONS, RULES, Rule, bind_local
from gshard.tensors.factors import all_dims
from tests.oracle import check, even_split, kinds, random_array, sent
from tests.rules.test_unknown import new_primitive


@pytest.fixture(autouse=True)
def _forget_rules():
    """What a test teaches is not gshard's own."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize("registry", [RULES, REGIONS])
def test_each_operator_of_gshard_has_one_rule(registry):
    primitive, known = next(iter(registry.items()))
    with pytest.raises(AssertionError, match=primitive.name):
        registry.add(known, primitive)


def matmul_primitive():
    return new_primitive("my_matmul", lambda a, b: jnp.einsum("bmk,kn->bmn", a, b))


MATMUL = "b m k, k n -> b m n"


@pytest.mark.parametrize(
    ("split_a", "split_b", "expected"),
    [
        (even_split(3, 0, 5), None, {}),
        (None, even_split(2, 1, 7), {}),
        (even_split(3, 2, 8), even_split(2, 0, 8), {"all_reduce": 1}),
        (even_split(3, 2, 3), even_split(2, 0, 3), {"all_reduce": 1}),  # uneven, idle devices
    ],
)
def test_a_rule_like_an_einsum(split_a, split_b, expected):
    primitive = matmul_primitive()
    gshard.register_rule(primitive, MATMUL, reduced={"k": "sum"})
    a, b = random_array((5, 4, 16)), random_array((16, 7))
    low = check(primitive.bind, a, b, inputs=[split_a, split_b], rtol=1e-4)
    assert kinds(low) == expected, low.collectives


def test_a_factor_that_is_not_reduced_stays_whole():
    primitive = matmul_primitive()
    gshard.register_rule(primitive, MATMUL)
    a, b = random_array((5, 4, 16)), random_array((16, 7))
    low = check(primitive.bind, a, b, inputs=[even_split(3, 2, 8), even_split(2, 0, 8)], rtol=1e-4)
    assert kinds(low) == {"all_gather": 2}
    assert all("operand of my_matmul" in c.reason for c in low.collectives)


def test_of_two_reductions_the_last_one_is_named():
    primitive = new_primitive("max_of_sums", lambda x: jnp.max(jnp.sum(x, 1)))
    gshard.register_rule(primitive, "m k ->", reduced={"m": "max"})
    x = random_array((13, 16))
    assert kinds(check(primitive.bind, x, inputs=[even_split(2, 0, 8)])) == {"all_reduce": 1}
    assert kinds(check(primitive.bind, x, inputs=[even_split(2, 1, 8)])) == {"all_gather": 1}


def test_leading_dims_and_a_rule_from_the_equation():
    """The last dim is reversed, so it stays whole; however many dims stand before it are free."""
    primitive = new_primitive("flip_last", lambda x: x[..., ::-1])
    gshard.register_rule(primitive, "...i -> ...j")
    other = new_primitive("flip_first", lambda x: x[::-1])
    gshard.register_rule(
        other,
        lambda eqn: (
            f"a{' d' * (eqn.invars[0].aval.ndim > 1)} -> "
            + ("b d" if eqn.invars[0].aval.ndim > 1 else "b")
        ),
    )
    x = random_array((13, 8))
    assert sent(check(primitive.bind, x, inputs=[even_split(2, 0, 8)], exact=True)) == 0
    assert sent(check(other.bind, x, inputs=[even_split(2, 1, 8)], exact=True)) == 0
    assert sent(check(primitive.bind, x, inputs=[even_split(2, 1, 8)], exact=True)) > 0
    assert sent(check(other.bind, x, inputs=[even_split(2, 0, 8)], exact=True)) > 0
    check(other.bind, x[:, 0], inputs=[even_split(1, 0, 8)], exact=True)


def test_a_dim_of_two_factors():
    """(a b) -> a b: a split by whole rows of `a` stays where it is."""
    primitive = new_primitive("unfold", lambda x: x.reshape(8, 3))
    gshard.register_rule(primitive, "(a b) -> a b", local=lambda x: x.reshape(-1, 3))
    low = check(primitive.bind, random_array((24,)), inputs=[even_split(1, 0, 8)], exact=True)
    assert sent(low) == 0


def test_local_takes_the_place_of_the_primitive():
    """Shapes in parameters: a tile needs its own."""

    def fill(x, *, rows):
        return jnp.broadcast_to(x.sum(1, keepdims=True), (rows, 3))

    primitive = new_primitive("fill", fill)
    gshard.register_rule(primitive, "r k -> r n", local=lambda x, *, rows: fill(x, rows=x.shape[0]))
    low = check(
        lambda x: primitive.bind(x, rows=13), random_array((13, 4)), inputs=[even_split(2, 0, 8)]
    )
    assert sent(low) == 0


def test_a_rule_in_full():
    primitive = new_primitive("my_neg", lambda x: -x)
    gshard.register_rule(
        primitive,
        gshard.Rule(lambda eqn: gshard.Factors.of(eqn, [["d"]], [["d"]]), level=0),
    )
    assert sent(check(primitive.bind, random_array((13,)), inputs=[even_split(1, 0, 8)])) == 0


def test_the_last_rule_counts():
    """Also for equations like those that have run, of which much is remembered."""
    primitive, ran = new_primitive("told_twice", lambda x: x * 2), []

    def lowered():
        x = jax.ShapeDtypeStruct((16,), jnp.float32)
        fn = gshard.jit(lambda x: primitive.bind(primitive.bind(gshard.split(x, 0, 8))), devices=8)
        return fn.lower(x)

    def run(ctx, eqn, way, tiles, targets):
        ran.append(eqn)
        return way.how.run(ctx, eqn, bind_local, tiles, targets)

    gshard.register_rule(primitive, Rule(all_dims))
    lowered()
    gshard.register_rule(primitive, Rule(all_dims, run=run))
    assert lowered().collectives == []
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("b m k, k n b m n", {}, "no ->"),
        ("b (m k -> b", {}, "Brackets are not balanced"),
        (MATMUL, {"reduced": {"k": "mean"}}, "allowed are 'sum', 'max'"),
        ("m k ->", {"reduced": {"k": "sum", "m": "max"}}, "has several reductions"),
        (MATMUL, {"reduced": {"n": "sum"}}, r"occur in operands only, which are here \['k'\]"),
    ],
)
def test_what_a_rule_may_say(rule, settings, message):
    with pytest.raises(ValueError, match=message):
        gshard.register_rule(matmul_primitive(), rule, **settings)


def test_a_rule_that_does_not_fit_names_the_line():
    primitive = matmul_primitive()
    a, b = random_array((5, 4, 16)), random_array((16, 7))
    gshard.register_rule(primitive, "b m k -> b m n")
    with pytest.raises(ValueError, match=r"test_register.py:\d+: .*names 1 operands.* 2"):
        gshard.jit(lambda a, b: primitive.bind(a, b)).lower(a, b)
    gshard.register_rule(primitive, "m k, k n -> m n")
    with pytest.raises(ValueError, match=r"has 2 dims for a tensor of shape \(5, 4, 16\)"):
        gshard.jit(lambda a, b: primitive.bind(a, b)).lower(a, b)
    with pytest.raises(TypeError, match="is not a primitive"):
        gshard.register_rule(jnp.sin, "i -> i")


# ---------------------------------------------------------------- custom_partitioning


def custom_fft(rule):
    """JAX's own example: the last dim is transformed, the others are free."""
    fft = custom_partitioning(lambda x: jnp.fft.fft(x).real)

    def partition(mesh, args, result):
        (arg,) = args
        spec = P(*tuple(arg.sharding.spec)[: len(arg.shape) - 1])
        own = NamedSharding(mesh, spec)
        return mesh, lambda x: jnp.fft.fft(x).real, own, (own,)

    fft.def_partition(partition=partition, sharding_rule=rule)
    return fft


@pytest.mark.parametrize("rule", ["...i -> ...i", lambda mesh, args, results: ("...i -> ...j", {})])
def test_custom_partitioning_runs_by_its_rule(rule):
    x = random_array((13, 4, 8))
    low = check(custom_fft(rule), x, inputs=[even_split(3, 0, 8)], rtol=1e-4, atol=1e-4)
    assert sent(low) == 0
    low = check(custom_fft(rule), x, inputs=[np.arange(8).reshape(2, 4, 1)], rtol=1e-4, atol=1e-4)
    assert sent(low) == 0
    low = check(custom_fft(rule), x, inputs=[even_split(3, 2, 8)], rtol=1e-4, atol=1e-4)
    assert kinds(low)


def custom_matmul():
    """The callback sums over the axes of `k` by itself; it looks at them in a loop, too."""
    matmul = custom_partitioning(lambda a, b: a @ b)

    def partition(mesh, args, result):
        a, b = args
        names = a.sharding.spec[1]

        def lower(a, b):
            out = a @ b
            return (
                jax.lax.fori_loop(0, 1, lambda i, c: jax.lax.psum(c, names), out) if names else out
            )

        return mesh, lower, result.sharding, (a.sharding, b.sharding)

    matmul.def_partition(
        partition=partition, sharding_rule="m k, k n -> m n", reduction_factors=("k",)
    )
    return matmul


@pytest.mark.parametrize(
    ("split_a", "split_b"),
    [
        (np.arange(8).reshape(1, 8), np.arange(8).reshape(8, 1)),
        (np.arange(8).reshape(2, 4), None),
        (np.arange(8)[::-1].reshape(4, 2), np.arange(8)[::-1].reshape(4, 2).T.reshape(2, 4)),
        (np.arange(6).reshape(1, 6), None),
    ],
)
def test_collectives_of_custom_partitioning(split_a, split_b):
    a, b = random_array((12, 16)), random_array((16, 8))
    check(custom_matmul(), a, b, inputs=[split_a, split_b], rtol=1e-4, atol=1e-4)


def test_collectives_of_custom_partitioning_are_listed():
    a, b = random_array((12, 16)), random_array((16, 8))
    split_a, split_b = np.arange(8).reshape(1, 8), np.arange(8).reshape(8, 1)
    low = check(custom_matmul(), a, b, inputs=[split_a, split_b], rtol=1e-4, atol=1e-4)
    (reduce,) = low.collectives
    assert (reduce.kind, reduce.group_size) == ("all_reduce", 8)
    assert "custom_partitioning" in reduce.reason


def numbered_sums(collective):
    """Sums over a dim of the device's own, which are not collectives, plus the part's number."""

    def sums(x):
        return jnp.sum(x, axis=1) + jnp.repeat(jnp.arange(4.0), x.shape[0] // 4)

    fn = custom_partitioning(sums)

    def partition(mesh, args, result):
        (name,) = args[0].sharding.spec[0]
        own = NamedSharding(mesh, P(name))
        return mesh, lambda x: jnp.sum(x, axis=1) + collective(name), own, (own,)

    fn.def_partition(partition=partition, sharding_rule="i j -> i")
    return fn


def test_a_sum_and_a_number_in_custom_partitioning():
    low = check(
        numbered_sums(jax.lax.axis_index), random_array((12, 6)), inputs=[[[0], [1], [2], [3]]]
    )
    assert sent(low) == 0


def test_a_collective_that_custom_partitioning_cannot_have():
    def shuffled(name):
        return jax.lax.pbroadcast(0.0, name, 0)

    fn = gshard.jit(lambda x: numbered_sums(shuffled)(gshard.split(x, 0, 4)), devices=4)
    with pytest.raises(NotImplementedError, match="cannot run 'pbroadcast' in the function that"):
        fn.lower(random_array((12, 6)))


def test_custom_partitioning_without_a_rule_is_its_body():
    with jax.enable_x64(False):
        fn = custom_partitioning(lambda x: jnp.sin(x) * 2)
        fn.def_partition(partition=lambda mesh, args, result: None)
    assert sent(check(fn, random_array((13,)), inputs=[even_split(1, 0, 8)])) == 0


def test_a_rule_in_full_is_written_with_the_public_module_alone():
    """Rows are independent; with columns in tiles there is no way to run it."""
    primitive = new_primitive("centred", lambda x: x - jnp.mean(x, axis=1, keepdims=True))
    asked = []

    def factors(eqn):
        return extend.Factors.of(eqn, [["row", "column"]], [["row", "column"]])

    def ways(eqn, shardings, targets, limit):
        rows = shardings[0].replace(1, None)
        yield extend.Way((rows,), (rows,))

    def run(ctx: extend.Context, eqn, way, tiles, wanted):
        (tile,), (rows,) = tiles, way.operands
        moved = ctx.reshard(tile, rows, extend.Reason("operand", "centred", "a mean over columns"))
        asked.append(tile.sharding)
        (out,) = extend.bind_local(ctx, eqn, [moved], [moved.array.shape])
        return [extend.Tile(out, rows, tile.shape)]

    doc = extend.Doc(free="rows", gather="columns")
    gshard.register_rule(primitive, extend.Rule(factors, ways=ways, run=run, doc=doc))
    x = random_array((16, 24))
    lowered = check(lambda x: primitive.bind(gshard.split(x, 0, 8)), x)
    assert not lowered.collectives
    lowered = check(lambda x: primitive.bind(gshard.split(x, 1, 8)), x)
    assert set(kinds(lowered)) <= {"all_gather", "all_to_all"}
    assert len(lowered.collectives) == 1
    assert asked
