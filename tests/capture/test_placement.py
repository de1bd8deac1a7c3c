"""JAX's sharding language: what it says is read as annotations, and results speak it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

import gshard
from gshard.capture.placement import DeviceOrder
from tests.oracle import random_array, run, sent
from tests.shows import shows

P = jax.P
AUTO = (AxisType.Auto,) * 2


def mesh_of(shape=(2, 4), order=None, types=AUTO) -> Mesh:
    devices = np.array(jax.devices())[np.arange(8) if order is None else np.asarray(order)]
    return Mesh(devices.reshape(shape), ("data", "model"), types)


@shows("sharded arguments")
@pytest.mark.parametrize("order", [None, [3, 1, 0, 2, 7, 5, 6, 4]])
def test_arguments_that_lie_sharded_are_annotated(order):
    named = NamedSharding(mesh_of(order=order), P("data", "model"))
    x = jax.device_put(random_array((16, 8)), named)
    step = gshard.jit(lambda x: jnp.sin(x))
    y = run(step, x)
    assert y.sharding == named, "not on the user's mesh under the user's names"
    assert str(step.lower(x).in_shardings[0]).startswith("split dim 0 by 2 x dim 1 by 4")
    assert step.lower(x).collectives == []
    np.testing.assert_allclose(y, np.sin(np.asarray(x)), rtol=1e-6)
    pointers = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    placed = step.lower(x).compile().place(x)[0]
    assert [s.data.unsafe_buffer_pointer() for s in placed.addressable_shards] == pointers


@st.composite
def named_shardings(draw) -> tuple[NamedSharding, tuple[int, ...]]:
    axes = draw(st.permutations(["data", "model"]))
    spec = [None, None, None]
    for axis in axes[: draw(st.integers(0, 2))]:
        dim = draw(st.integers(0, 2))
        spec[dim] = (*(spec[dim] or ()), axis)
    shape = draw(st.sampled_from([(2, 4), (4, 2), (8, 1)]))
    order = draw(st.permutations(range(8)))
    return NamedSharding(mesh_of(shape, order), P(*spec)), (16, 8, 24)


@given(named_shardings())
def test_a_named_sharding_read_and_said_again_is_the_same(drawn):
    named, shape = drawn
    order = DeviceOrder(tuple(jax.devices()))
    sharding, _ = order.sharding(named, len(shape))
    held = named.devices_indices_map(shape)
    local = sharding.local_shape(shape)
    for device, index in held.items():
        number = order.numbers[device]
        for dim, (split, cut) in enumerate(zip(sharding.splits, index, strict=True)):
            start = int(split.coords[number]) * local[dim] if split else 0
            assert (cut.start or 0) == start
    x = jax.device_put(random_array(shape), named)
    y = run(gshard.jit(lambda x: x * 2), x)
    assert y.sharding.is_equivalent_to(named, 3)
    np.testing.assert_array_equal(y, np.asarray(x) * 2)


@shows("ShapeDtypeStruct(sharding=...)")
def test_shapes_with_shardings():
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh_of(), P("data")))
    assert str(gshard.jit(lambda x: x).lower(x).in_shardings[0]) == "split dim 0 by 2, 4 copies"
    abstract = AbstractMesh((64, 32), ("d", "m"))
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(abstract, spec))
        for shape, spec in [((4096, 64), P("d")), ((64, 64), P(None, "m"))]
    )
    lowered = gshard.jit(jnp.matmul, devices=2048).lower(x, w)
    assert lowered.out_shardings.tiles == (64, 32)
    assert lowered.collectives == []


@shows("in_shardings", "out_shardings")
def test_in_and_out_shardings():
    mesh = mesh_of()
    rows, both = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data", "model"))
    step = gshard.jit(jnp.matmul, in_shardings=(rows, None), out_shardings=both)
    x, w = random_array((16, 8)), random_array((8, 8))
    y = run(step, x, w)
    assert y.sharding == both
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-6)
    assert str(step.lower(x, w).in_shardings[0]) == "split dim 0 by 2, 4 copies"
    tree = gshard.jit(lambda t: {"y": t["a"] + t["b"]}, in_shardings=({"a": rows, "b": None},))
    assert tree({"a": x, "b": x})["y"].sharding.spec == P("data")
    own = gshard.jit(lambda x: x * 2, out_shardings=step.lower(x, w).out_shardings)
    assert own.lower(x).out_shardings == step.lower(x, w).out_shardings
    with pytest.raises(ValueError, match="in_shardings does not match"):
        gshard.jit(jnp.matmul, in_shardings=(rows, rows, rows))(x, w)
    deep = NamedSharding(rows.mesh, P(None, None, rows.mesh.axis_names[0]))
    for keyword in ("in_shardings", "out_shardings"):
        with pytest.raises(ValueError, match=rf"{keyword}( of x)?: .* 3 entries, .* 2 dims"):
            gshard.jit(lambda x: x * 2, **{keyword: deep})(x)


def test_shardings_that_do_not_divide():
    """Where `jax.jit` refuses."""
    rows = NamedSharding(mesh_of(), P(("data", "model")))
    x = random_array((13, 3))
    y = run(gshard.jit(lambda x: x * 2, in_shardings=rows, out_shardings=rows), x)
    assert isinstance(y, gshard.UnevenArray)
    np.testing.assert_array_equal(np.asarray(y), x * 2)


@shows("lax.with_sharding_constraint")
def test_constraints_are_annotations():
    mesh = mesh_of()
    x, w = random_array((16, 8)), random_array((8, 8))

    def fn(x, w):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None)))
        w = lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "model")))
        return x @ w

    step = gshard.jit(fn)
    y = run(step, x, w)
    assert y.sharding == NamedSharding(mesh, P("data", "model"))
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-6)
    assert step.lower(x, w).collectives == []

    def in_a_loop(x):
        rows = NamedSharding(mesh, P("data"))
        return lax.fori_loop(0, 3, lambda _, c: lax.with_sharding_constraint(c * 2, rows), x)

    np.testing.assert_array_equal(run(gshard.jit(in_a_loop), x), x * 8)
    assert gshard.jit(in_a_loop)(x).sharding.spec == P("data")


def test_unconstrained_dims_stay_open():
    mesh = mesh_of()

    def fn(x):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", P.UNCONSTRAINED)))
        return lax.with_sharding_constraint(x + 1, NamedSharding(mesh, P("data", "model")))

    assert gshard.jit(fn).lower(random_array((16, 8))).in_shardings[0].tiles == (2, 4)


@shows("jax.set_mesh")
def test_the_mesh_that_is_set():
    x = random_array((16, 8))
    mesh = mesh_of(order=[1, 0, 3, 2, 5, 4, 7, 6])
    with jax.set_mesh(mesh):
        y = gshard.jit(lambda x: lax.with_sharding_constraint(x * 2, P("data")))(x)
        assert y.sharding == NamedSharding(mesh, P("data"))
        z = gshard.jit(lambda x: x * 2, in_shardings=P("data"), out_shardings=P(None, "model"))(x)
        assert z.sharding == NamedSharding(mesh, P(None, "model"))
    np.testing.assert_array_equal(y, x * 2)
    np.testing.assert_array_equal(z, x * 2)


@shows("explicit axis types")
def test_explicit_axes():
    with jax.set_mesh(mesh_of(types=(AxisType.Explicit,) * 2)):
        x = jax.device_put(random_array((16, 8)), P("data", None))
        w = jax.device_put(random_array((8, 8)), P(None, "model"))

        def fn(x, w):
            y = jnp.tanh(x @ w)
            z = jax.sharding.reshard(y, P("data", None))
            return y, lax.scan(lambda c, _: (jnp.sin(c), None), z, None, length=2)[0]

        got, wanted = run(gshard.jit(fn), x, w), jax.jit(fn)(x, w)
        for a, b in zip(got, wanted, strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(a, b, rtol=1e-5)


@shows("Flax's logical constraints")
def test_logical_constraints_of_flax():
    nn = pytest.importorskip("flax.linen")
    rules = (("batch", "data"), ("embed", "model"))
    x = random_array((16, 8))
    with jax.set_mesh(mesh_of()), nn.logical_axis_rules(rules):
        step = gshard.jit(lambda x: nn.with_logical_constraint(x * 2, ("batch", "embed")))
        y = run(step, x)
    assert y.sharding.spec == P("data", "model")
    np.testing.assert_array_equal(y, x * 2)


def test_equal_shardings_under_other_names_are_not_moved():
    x = random_array((16, 8))
    rows = gshard.jit(lambda x: gshard.split(x, 0, 8) * 2)
    y = jax.device_put(x, NamedSharding(mesh_of(), P(("data", "model"))))
    lowered = rows.lower(x)
    placed = lowered.compile().place(y)[0]
    pointers = [s.data.unsafe_buffer_pointer() for s in y.addressable_shards]
    assert [s.data.unsafe_buffer_pointer() for s in placed.addressable_shards] == pointers
    np.testing.assert_array_equal(rows(y), x * 2)


def test_what_the_program_wants_otherwise_is_seen_in_its_collectives():
    x = jax.device_put(random_array((16, 8)), NamedSharding(mesh_of((8, 1)), P("data")))
    lowered = gshard.jit(lambda x: gshard.split(x, 1, 8)).lower(x)
    assert sent(lowered, "all_to_all") == 16 * 8 * 4 // 8 * 7 // 8


def test_an_argument_that_is_whole_everywhere_says_nothing():
    x = jax.device_put(random_array((16, 8)), NamedSharding(mesh_of(), P()))
    lowered = gshard.jit(lambda x: gshard.split(x, 0, 8) * 2).lower(x)
    assert lowered.in_shardings[0].tiles == (8, 1)


def test_one_program_for_arguments_that_lie_nowhere_and_where_it_wants_them():
    traced = []

    def fn(p, x):
        traced.append(1)
        return p - 0.1 * gshard.split(p, 0, 2) * jnp.mean(gshard.split(x, 0, 8))

    step, p, x = gshard.jit(fn), random_array((4, 6)), random_array((16, 4))
    first = step.lower(p, x)
    for _ in range(3):
        p = step(p, x)
    assert traced == [1]
    assert step.lower(p, x) is first


def test_a_mesh_of_some_devices():
    mesh = Mesh(np.array(jax.devices()[4:]), ("x",))
    x = jax.device_put(random_array((8, 3)), NamedSharding(mesh, P("x")))
    y = gshard.jit(lambda x: x + 1)(x)
    assert y.sharding.device_set == set(jax.devices()[4:])
    with pytest.raises(ValueError, match="4 devices that are not"):
        gshard.jit(
            lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P("x"))),
            devices=jax.devices()[:4],
        )(random_array((8, 3)))


def test_a_number_of_devices_with_the_users_mesh():
    """A number of devices is that of the mesh in the program; a mesh of others is refused."""
    rows = NamedSharding(mesh_of(order=[3, 1, 0, 2, 7, 5, 6, 4]), P("data"))

    def program(x):
        return lax.with_sharding_constraint(x, rows).sum(0)

    x = random_array((16, 8))
    by_number = gshard.jit(program, devices=8).lower(x)
    by_devices = gshard.jit(program, devices=jax.devices()).lower(x)
    assert by_number.in_shardings == by_devices.in_shardings
    assert sent(by_number) == sent(by_devices)
    with pytest.raises(ValueError, match="8 devices that are not among the 16"):
        gshard.jit(program, devices=16).lower(x)


def test_a_spec_without_a_mesh():
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        gshard.jit(lambda x: x, in_shardings=P("data"))(random_array((8,)))


def test_a_number_that_is_annotated():
    x = random_array((8,))
    np.testing.assert_array_equal(gshard.jit(lambda x: x * gshard.replicate(2.0))(x), 2 * x)


@pytest.mark.parametrize("placed", ["argument", "in_shardings", "device"])
def test_one_device_of_an_argument_does_not_determine_the_devices(placed):
    """With a mesh of one device or without one; a mesh that is set does, and so does `devices=`."""
    mesh = Mesh(np.array(jax.devices()[3:4]), ("data",))
    one, x = NamedSharding(mesh, P("data")), random_array((16, 4))
    there = {"argument": jax.device_put(x, one), "device": jax.device_put(x, jax.devices()[3])}
    keywords = {"in_shardings": one} if placed == "in_shardings" else {}
    step = gshard.jit(lambda x: gshard.split(x * 2, 0, 8), **keywords)
    given = there.get(placed, x)
    np.testing.assert_array_equal(run(step, given), x * 2)
    assert len(step(given).devices()) == 8
    with jax.set_mesh(mesh):
        assert gshard.jit(lambda x: x * 2)(given).devices() == {jax.devices()[3]}
    on_four = gshard.jit(lambda x: x * 2, devices=jax.devices()[:4])
    assert on_four(given).devices() == set(jax.devices()[:4])
    wide = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    both = gshard.jit(lambda x, y: x + y)
    assert both(given, jax.device_put(x, wide)).devices() == set(jax.devices()[:2])


def test_messages_about_keywords_name_them():
    """An annotation by a keyword has no line of the user's code."""
    rows = NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)), P("d"))

    def part(x):
        return gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, 8))

    fn = gshard.jit(part, out_shardings=rows)
    with pytest.raises(ValueError, match=r"^out_shardings: P\('d',?\) conflicts with the manual"):
        fn(random_array((16, 4)))


@pytest.mark.parametrize("keyword", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize("given", ["a", 3, ["x"], {"q": 1}])
def test_what_is_no_sharding_is_named_at_once(keyword, given):
    with pytest.raises(TypeError, match=f"{keyword} has .*, and takes trees of NamedSharding"):
        gshard.jit(lambda x: x, **{keyword: given})


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_in_shardings_leave_static_arguments_out_as_in_jax(static):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    given = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    args = np.arange(8.0, dtype=np.float32), 3, np.ones(8, np.float32)

    def fn(a, n, b):
        return n * a + b

    jitted = gshard.jit(fn, in_shardings=given, **static)
    np.testing.assert_array_equal(jitted(*args), jax.jit(fn, in_shardings=given, **static)(*args))
    assert [s.tiles for s in jax.tree.leaves(jitted.lower(*args).flat_shardings[0])] == [(8,), (1,)]
