"""What users of JAX write every day, with `gshard.jit` for `jax.jit`, on 1, 6 and 8 devices."""

import dataclasses
import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from tests.oracle import random_array, run
from tests.shows import shows

COUNTS = (1, 6, 8)
X = random_array((13, 6))  # 13 rows: no count of devices but 1 divides them


def same(got, wanted):
    """Equal trees of arrays of equal types, weak ones included."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def check(fn, *args, devices):
    same(run(gshard.jit(fn, devices=jax.devices()[:devices]), *args), jax.jit(fn)(*args))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weights: jax.Array
    nothing: object = None
    steps: int = dataclasses.field(default=1, metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, value, tag):
        self.value, self.tag = value, tag

    def tree_flatten(self):
        return (self.value,), self.tag

    @classmethod
    def tree_unflatten(cls, tag, values):
        return cls(*values, tag)


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, cotangent: (2 * cotangent * jnp.cos(x),)
)


@jax.custom_jvp
def tripled_derivative(x):
    return x**2


@tripled_derivative.defjvp
def _(primals, tangents):
    return primals[0] ** 2, 3 * primals[0] * tangents[0]


@shows("dataclasses, custom nodes and None in arguments and results")
@pytest.mark.parametrize("devices", COUNTS)
def test_trees(devices):
    def fn(state, pair, other):
        weights = gshard.split(state.weights, 0, devices) * state.steps
        results = State(weights, state.nothing, state.steps), Pair(pair.value + 1, pair.tag)
        return results, {"none": None, "empty": [], "same": other["a"]}

    check(fn, State(X), Pair(np.arange(5), "tag"), {"a": 1.5, "b": None}, devices=devices)
    check(fn, State(X, X[0], 4), Pair(1, ("tag", 1)), {"a": True}, devices=devices)


@shows("Python numbers, NumPy scalars and lists as arguments")
@pytest.mark.parametrize("devices", COUNTS)
def test_numbers(devices):
    def fn(a, b, c, listed):
        return a + b, c * 2, listed, 1.0, jnp.sum(c), lax.full((3,), a)

    check(fn, 1, 2.5, np.arange(3), [1, [2.0, np.float32(3)], True, 3 + 2j], devices=devices)
    check(fn, np.int8(1), np.float16(2.5), np.ones((0, 3)), [], devices=devices)


@shows("random keys that a function closes over")
def test_keys_from_outside():
    """Called again, too: the second call is another way into the program."""
    key, keys = jax.random.key(3), jax.random.split(jax.random.key(1), 8)

    def fn(x):
        def add(x, row):
            drawn = jax.random.normal(keys[2]) + jax.random.normal(key, x.shape)
            return x + drawn + row, None

        return lax.scan(add, gshard.split(x, 0, 8), jnp.ones((3, *x.shape)))[0]

    # 16 rows: uneven results take the long way always.
    step, x = gshard.jit(fn), jnp.asarray(random_array((16, 6)))
    for _ in range(3):
        wanted, x = jax.jit(fn)(x), step(x)
        np.testing.assert_allclose(x, wanted, rtol=1e-6)


@shows("lax.while_loop with a carry that is split")
@pytest.mark.parametrize("devices", COUNTS)
def test_loops(devices):
    def fn(x):
        def step(carry):
            return carry[0] + 1, carry[1] * 1.5 + carry[1].mean()

        start = 0, gshard.split(x, 0, devices)
        return lax.while_loop(lambda c: (c[0] < 5) & (jnp.max(c[1]) < 9), step, start)

    check(fn, X, devices=devices)


@shows("jax.custom_vjp", "jax.custom_jvp")
@pytest.mark.parametrize("devices", COUNTS)
def test_own_derivatives(devices):
    def loss(x):
        return jnp.sum(doubled_gradient(gshard.split(x, 0, devices)) * tripled_derivative(x))

    check(jax.value_and_grad(loss), X, devices=devices)
    jitted = gshard.jit(doubled_gradient, devices=jax.devices()[:devices])
    same(jax.grad(lambda x: jnp.sum(jitted(x)))(X), 2 * jnp.cos(X))


@shows("gradients of integers (float0)")
@pytest.mark.parametrize("devices", COUNTS)
def test_gradients_of_integers(devices):
    def fn(x, counts):
        weighed = gshard.split(x, 0, devices) * gshard.split(counts, 0, devices)
        return jnp.sum(jnp.sin(weighed))

    step = gshard.jit(jax.grad(fn, (0, 1), allow_int=True), devices=jax.devices()[:devices])
    counts = np.arange(13 * 6).reshape(13, 6)
    wanted = jax.jit(jax.grad(fn, (0, 1), allow_int=True))(X, counts)
    for _ in range(3):
        got = step(X, counts)
        same(got[0], wanted[0])
        assert (got[1].shape, got[1].dtype) == (wanted[1].shape, jax.dtypes.float0)


@shows("jax.checkpoint_policies")
@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("hidden"),
    ],
)
def test_checkpoint_policies(policy, devices):
    def loss(w, x):
        layer = jax.checkpoint(lambda x: checkpoint_name(jnp.tanh(x @ w), "hidden"), policy=policy)
        return jnp.sum(layer(layer(gshard.split(x, 0, devices))))

    check(jax.grad(loss), 0.3 * jnp.eye(6), X, devices=devices)


@shows("jax.vmap with spmd_axis_name")
@pytest.mark.parametrize("devices", COUNTS)
def test_vmap_over_a_mesh_axis(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))

    def fn(x):
        whole = NamedSharding(mesh, PartitionSpec(None))
        return jax.vmap(
            lambda row: lax.with_sharding_constraint(2 * row, whole), spmd_axis_name="d"
        )(x)

    check(fn, jnp.ones((24, 3)), devices=devices)
    lowered = gshard.jit(fn, devices=mesh.devices).lower(jnp.ones((24, 3)))
    assert lowered.out_shardings.tiles == (devices, 1)


@shows("jax.named_scope", "jax.debug.print", "jax.debug.callback", "io_callback")
@pytest.mark.parametrize("devices", COUNTS)
def test_effects(devices, capfd):
    seen, largest = [], []

    def note(value):
        seen.append(np.asarray(value))
        return np.float32(value.sum())

    def fn(x):
        number = jax.ShapeDtypeStruct((), np.float32)
        with jax.named_scope("noted"):
            x = gshard.split(x, 0, devices)
            first = io_callback(note, number, x, ordered=True)
            second = io_callback(note, number, 2 * x, ordered=True)
            jax.debug.print("the sum is {s:.1f}", s=x.sum())
            jax.debug.callback(lambda most: largest.append(float(most)), x.max())
        return first + second + x

    rows = np.arange(11, dtype=np.float32)
    got = gshard.jit(fn, devices=jax.devices()[:devices])(rows)
    jax.effects_barrier()
    np.testing.assert_array_equal(got, rows + 165)
    np.testing.assert_array_equal(seen, [rows, 2 * rows])  # each once, in order
    assert largest == [10.0]
    assert capfd.readouterr().out.count("the sum is 55.0") == 1


@shows("references (jax.new_ref) as arguments")
@pytest.mark.parametrize("rows", [16, 13])
@pytest.mark.parametrize("devices", COUNTS)
def test_references(devices, rows):
    def fn(refs, x, times):
        refs["sum"][0] += times * jnp.sum(x)
        refs["all"][...] = gshard.split(refs["all"][...] + x, 0, devices)
        return refs["sum"][...]

    def run(jit):
        refs = {"sum": jax.new_ref(jnp.zeros(2)), "all": jax.new_ref(jnp.ones(rows))}
        jitted = jit(fn, static_argnums=2)
        results = [jitted(refs, jnp.arange(rows) / 4 * i, 3) for i in range(3)]
        return results, {k: ref[...] for k, ref in refs.items()}

    same(run(functools.partial(gshard.jit, devices=jax.devices()[:devices])), run(jax.jit))


def test_a_reference_stays_where_the_program_wants_it():
    def fn(ref):
        ref[...] = gshard.split(ref[...] * 2, 0, 8)

    ref, jitted = jax.new_ref(jnp.ones(16)), gshard.jit(fn)
    jitted(ref)
    assert ref.sharding.shard_shape((16,)) == (2,)
    lowered = jitted.lower(ref)
    assert lowered.collectives == []
    assert [info.donated for info in jax.tree.leaves(lowered.args_info)] == [True]
    jitted(ref)
    np.testing.assert_array_equal(ref[...], np.full(16, 4.0))
    with pytest.raises(ValueError, match="one reference is passed as two arguments"):
        gshard.jit(lambda a, b: a[...] + b[...])(ref, ref)


def test_a_reference_now_as_one_argument_and_now_as_another():
    jitted = gshard.jit(lambda a, b: a[...] - 2 * b[...])
    ref, x = jax.new_ref(jnp.ones(3)), jnp.arange(3.0)
    np.testing.assert_array_equal(jitted(ref, x), 1 - 2 * x)
    np.testing.assert_array_equal(jitted(x, ref), x - 2)
    np.testing.assert_array_equal(ref[...], np.ones(3))


@shows("references that a function closes over")
def test_references_from_outside():
    def run(jit):
        counter, total = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.ones(13))

        @functools.partial(jit, donate_argnums=0)
        def fn(x, **more):
            counter[0] += 1
            total[...] = gshard.split(total[...], 0, 8) + x
            return {"sum": jnp.sum(total[...]), **more}

        @jit
        def both(ref):
            ref[...] += counter[...]

        results = [fn(jnp.arange(13.0), y=i) for i in range(3)]
        other = jax.new_ref(jnp.ones(2))
        both(other)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"pass it once|twice"):
            both(counter)
        nested = jax.jit(lambda x: fn(x)["sum"] + 1)(jnp.ones(13))
        return results, nested, [ref[...] for ref in (counter, total, other)]

    same(run(gshard.jit), run(jax.jit))


@shows("calls from several threads")
def test_threads():
    jitted = gshard.jit(lambda x: gshard.split(x, 0, 8) * 2)
    failed = []

    def call(rows):
        try:
            for more in range(3):
                x = np.arange(rows + more, dtype=np.float32)
                np.testing.assert_array_equal(jitted(x), 2 * x)
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(3 * i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def rows_doubled(x):
    """Twice the rows."""
    return gshard.split(x, 0, 8) * 2


@shows("pickle")
def test_pickled_functions():
    jitted = gshard.jit(rows_doubled, static_argnames=(), donate_argnums=())
    again = pickle.loads(pickle.dumps(jitted))
    np.testing.assert_array_equal(again(X), 2 * X)
    assert again.__doc__ == jitted.__doc__ == "Twice the rows."


@shows("compiled programs, called with arrays under other shardings")
def test_compiled_with_other_shardings():
    x, w = jnp.asarray(random_array((16, 4))), jnp.ones((4, 3))
    lowered = gshard.jit(lambda x, w: gshard.split(x, 0, 8) @ w, donate_argnums=0).lower(x, w)
    compiled = lowered.compile()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    for spec in (PartitionSpec(("a", "b")), PartitionSpec("b", "a"), PartitionSpec()):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        np.testing.assert_allclose(compiled(placed, w), x @ w, rtol=1e-5)
    with pytest.raises(TypeError, match="compiled for arrays of the types"):
        compiled(x.astype(jnp.int32), w)


def test_the_text_of_a_program_with_callbacks():
    def fn(x):
        with jax.named_scope("told"):
            jax.debug.print("{}", jnp.sum(x))
        return x

    assert "debug" in gshard.jit(fn).lower(X).as_text()


@shows("what jax.stages say of a program")
def test_stages_say_the_same():
    def fn(x, *, y):
        return {"sum": gshard.split(x, 0, 8) + y}

    x = np.ones(16, np.float32)
    ours = gshard.jit(fn, donate_argnums=0).lower(x, y=2)
    theirs = jax.jit(fn, donate_argnums=0).lower(x, y=2)
    for mine, jaxs in ((ours, theirs), (ours.compile(), theirs.compile())):
        assert str(mine.in_avals) == str(jaxs.in_avals)
        assert mine.donate_argnums == jaxs.donate_argnums == (0,)
        assert (mine.in_tree, mine.out_tree) == (jaxs.in_tree, jaxs.out_tree)
    compiled = ours.compile()
    (of_x,), of_y = compiled.input_shardings
    assert of_x.shard_shape((16,)) == (2,)
    assert of_y["y"].is_fully_replicated
    result = compiled(x, y=2)["sum"]
    assert compiled.output_shardings["sum"] == result.sharding
    assert compiled.output_formats["sum"] == result.format
    (format_of_x,), _ = compiled.input_formats
    assert (format_of_x.sharding, format_of_x.layout) == (of_x, result.format.layout)
    np.testing.assert_array_equal(compiled.call(x, y=2)["sum"], result)
    np.testing.assert_array_equal(compiled.call(compiled._params, x, y=2)["sum"], result)
    assert compiled.runtime_executable() is not None


def test_stages_have_all_that_those_of_jax_have():
    def stages(jit):
        jitted = jit(lambda x: gshard.split(x, 0, 8) + 1)
        lowered = jitted.lower(X)
        return jitted, jitted.trace(X), lowered, lowered.compile()

    ours = stages(gshard.jit)
    for mine, jaxs in zip(ours, stages(jax.jit), strict=True):
        missing = {name for name in dir(jaxs) if not name.startswith("_")} - set(dir(mine))
        assert not missing, type(jaxs)
    ((uneven,), _), result = ours[-1].input_formats, ours[-1].output_formats
    assert uneven == result
    assert uneven.sharding.is_fully_replicated  # how JAX takes it: it has no sharding like that


def test_the_size_of_the_cache():
    jitted = gshard.jit(lambda x, _=None: x + 1)
    assert jitted._cache_size() == 0
    jitted(X)
    jitted(X)
    jitted(X[:3])
    assert jitted._cache_size() == 2
