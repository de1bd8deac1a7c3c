"""The keywords of `jax.jit`, its cache, and what surrounds a call."""

import gc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import gshard
from tests.oracle import check, random_array, run
from tests.shows import shows

X = random_array((16, 4))


def close(got, wanted):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6, atol=1e-6)


def double(x):
    return gshard.split(x, 0, 8) * 2


@shows("static_argnums", "static_argnames")
def test_static_arguments():
    def fn(x, n, *, name="a"):
        assert isinstance(n, int)
        return gshard.split(x, 0, 8) * n + len(name)

    close(gshard.jit(fn, static_argnums=1)(X, 3), X * 3 + 1)
    close(gshard.jit(fn, static_argnums=1)(X, n=2), X * 2 + 1)
    close(gshard.jit(fn, static_argnames=("n", "name"))(X, n=2, name="abc"), X * 2 + 3)
    close(gshard.jit(lambda x, n: x * range(n)[-1], static_argnums=-1)(X, 3), X * 2)

    @gshard.jit(static_argnums=1)
    def decorated(x, n):
        return x * n

    close(decorated(X, 5), X * 5)


@shows("methods with a static self")
def test_methods():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @gshard.jit(static_argnums=0)
        def static(self, x):
            return gshard.split(x, 0, 8) * self.scale

    np.testing.assert_array_equal(run(Model(3).static, X), X * 3)
    np.testing.assert_array_equal(run(Model(4).static, X), X * 4)


@shows("unhashable static arguments are refused")
def test_unhashable_static_arguments():
    step = gshard.jit(lambda x, scale: x * scale[0], static_argnums=1)
    with pytest.raises(ValueError, match="hash"):
        step(X, [2])
    leaf = gshard.jit(lambda x, scale: x * len(scale))
    with pytest.raises(ValueError, match="is not hashable"):
        leaf(X, {1, 2})


@shows("donate_argnums", "donate_argnames")
def test_donation():
    step = gshard.jit(lambda x, y: gshard.split(x, 0, 8) + y, donate_argnames="x")
    x = step(X, 1.0)
    step(x, 1.0)
    assert x.is_deleted()
    both = gshard.jit(lambda tree, y: {**tree, "a": double(tree["a"]) + y}, donate_argnums=0)
    tree = both({"a": X, "f": "name"}, 1.0)
    both(tree, 1.0)
    assert tree["a"].is_deleted()


@shows("keep_unused")
def test_unused_arguments():
    def fn(x, unused):
        return double(x)

    for keep in (False, True):
        compiled = gshard.jit(fn, keep_unused=keep).lower(X, X).compile()
        size = compiled.memory_analysis().argument_size_in_bytes
        assert size == (X.nbytes // 8 + X.nbytes if keep else X.nbytes // 8)
        np.testing.assert_array_equal(compiled(X, X), 2 * X)


@shows("compiler_options", "inline", "backend", "device")
def test_other_keywords():
    options = {"xla_cpu_enable_fast_math": True}
    np.testing.assert_array_equal(run(gshard.jit(double, compiler_options=options), X), X * 2)
    compiled = gshard.jit(double).lower(X).compile(compiler_options=options)
    np.testing.assert_array_equal(compiled(X), X * 2)
    np.testing.assert_array_equal(run(gshard.jit(double, inline=True, backend="cpu"), X), X * 2)
    y = gshard.jit(lambda x: x * 2, device=jax.devices()[3])(X)
    assert y.devices() == {jax.devices()[3]}
    with pytest.raises(ValueError, match="both given"):
        gshard.jit(double, device=jax.devices()[0], devices=jax.devices())


@shows("lower", "compile", "trace", "eval_shape", "clear_cache")
def test_stages():
    step = gshard.jit(lambda x, *, scale: {"y": double(x) * scale})
    lowered = step.lower(X, scale=2.0)
    assert lowered.out_info["y"].shape == X.shape
    assert "stablehlo" in lowered.as_text(dialect="stablehlo")
    compiled = lowered.compile()
    np.testing.assert_array_equal(compiled(X, scale=3.0)["y"], X * 6)
    with pytest.raises(TypeError, match=r"float32\[16, 4\].*float32\[8, 4\]"):
        compiled(X[:8], scale=3.0)
    assert step.trace(X, scale=2.0).jaxpr.in_avals[0].shape == X.shape
    step.clear_cache()
    np.testing.assert_array_equal(step(X, scale=3.0)["y"], X * 6)


@shows("serialize_executable")
def test_serialized_executables():
    compiled = gshard.jit(double).lower(X).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    np.testing.assert_array_equal(loaded(*compiled.place(X)), X * 2)
    uneven = gshard.jit(double).lower(X[:13]).compile()
    with pytest.raises(ValueError, match="do not divide"):
        serialize_executable.serialize(uneven)


@pytest.fixture
def cache_hits(tmp_path):
    """JAX's compilation cache, open to every program; the list has a line for each one found."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    hits = []

    def listen(event, **_):
        hits.extend([event] * event.endswith("/cache_hits"))

    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(listen)
    yield hits
    jax.monitoring.unregister_event_listener(listen)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("partitioner", ["gshard", "xla"])
@pytest.mark.parametrize("options", [None, {"xla_embed_ir_in_executable": True}])
def test_a_program_found_in_the_compilation_cache_is_serialized_with_its_code(
    cache_hits, partitioner, options
):
    def compiled():
        del cache_hits[:]
        return (
            gshard.jit(lambda x: double(x) + 1, partitioner=partitioner).lower(X).compile(options)
        )

    compiled()
    assert not cache_hits
    for _ in range(2):  # the cache has the program after it was compiled anew, too
        found = compiled()
        assert cache_hits
        parts = serialize_executable.serialize(found)
        loaded = serialize_executable.deserialize_and_load(*parts)
        close(loaded(*found.place(X)), X * 2 + 1)
        close(found(X), X * 2 + 1)


@shows("one trace for one kind of arguments")
def test_the_cache():
    traced = []

    def fn(x):
        traced.append(x.shape)
        return double(x)

    for _ in range(3):
        gshard.jit(fn)(X)  # jitted anew each time, as people do
    assert traced == [X.shape]
    gshard.jit(fn, devices=jax.devices()[::-1])(X)
    assert len(traced) == 2
    np.testing.assert_array_equal(jax.jit(fn)(X), X * 2)  # another function, not this one's program
    assert len(traced) == 3


@shows("jax.default_matmul_precision", "jax.enable_x64", "jax.numpy_dtype_promotion")
def test_contexts_are_part_of_the_key():
    product = gshard.jit(lambda x: x @ x.T)
    plain = str(product.lower(X).jaxpr)
    with jax.default_matmul_precision("highest"):
        assert str(product.lower(X).jaxpr) != plain
    wide = gshard.jit(lambda x: x * 2)
    assert wide(np.ones(8)).dtype == np.float32
    with jax.enable_x64(True):
        assert wide(np.ones(8)).dtype == np.float64
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="strict"):
        gshard.jit(lambda x: x + np.int32(1))(X)


def test_references_of_python_scalars_have_the_types_of_jax():
    """Whether a result is weakly typed depends on the release of JAX."""

    def changed(x):
        ref, count = jax.new_ref(0.0), jax.new_ref(0)
        ref[...] = ref[...] + 1.0
        jax.lax.fori_loop(0, 3, lambda i, _: count.__setitem__(..., count[...] + i), None)
        return ref[...] * x.sum(), ref[...], count[...]

    def frozen(x):
        ref = jax.new_ref(1.0)
        return jax.freeze(ref), x * 2

    for fn in (changed, frozen, lambda x: jax.new_ref(0.0)[...]):
        got, wanted = (jax.tree.leaves(each) for each in (run(gshard.jit(fn), X), jax.jit(fn)(X)))
        for a, b in zip(got, wanted, strict=True):
            assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
            close(a, b)


@shows("jax_enable_checks")
@pytest.mark.parametrize("rows", [16, 13])
def test_the_checks_of_jax(rows):
    """Collectives in the program, in a loop and in a branch, by reduction, exchange and halo."""

    def fn(x):
        x = gshard.split(x, 0, 8)
        total, _ = jax.lax.scan(lambda c, y: (jnp.sin(c + y), c), jnp.zeros(4), x @ x.T @ x)
        either = jax.lax.cond(x.sum() > 0, lambda x: x.cumsum(0), lambda x: x, x)
        return total, either, jnp.roll(x, 1, 0), x[jnp.argsort(x[:, 0])]

    jax.config.update("jax_enable_checks", True)
    try:
        lowered = check(fn, X[:rows])
        assert lowered.collectives
    finally:
        jax.config.update("jax_enable_checks", False)


@shows("jax.clear_caches", "jax.disable_jit", "jax.checking_leaks")
def test_global_switches():
    ran = []

    def fn(x):
        ran.append(1)
        return x * 2

    step = gshard.jit(fn)
    step(X), step(X)
    assert len(ran) == 1
    jax.clear_caches()
    step(X)
    assert len(ran) == 2
    with jax.disable_jit():
        step(X), step(X)
    assert len(ran) == 4


def test_nothing_of_the_arguments_stays_alive():
    step = gshard.jit(lambda tree: double(tree["x"]) + 1)
    for extra in ({}, {"name": "a"}):
        x = jnp.ones((16, 4))
        alive = weakref.ref(x)
        step({"x": x, **extra})
        step.lower({"x": x, **extra}).compile()({"x": x, **extra})
        del x
        gc.collect()
        assert alive() is None


def test_a_function_that_is_gone_leaves_nothing_behind():
    def made():
        held = jnp.ones((16, 4)) * 3

        def fn(x):
            return double(x) + held

        gshard.jit(fn)(X)
        gshard.jit(fn).lower(X).compile()(X)
        return weakref.ref(held)

    alive = made()
    gc.collect()
    assert alive() is None


def test_the_compiled_module_has_the_functions_name():
    def my_training_step(x):
        return double(x)

    assert "HloModule jit_my_training_step" in (
        gshard.jit(my_training_step).lower(X).compile().as_text()
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn])
def test_narrow_types(dtype):
    x = np.arange(16).astype(dtype)
    y = gshard.jit(lambda x: gshard.split(x, 0, 8) + x)(x)
    np.testing.assert_array_equal(np.asarray(y).astype(int), (x + x).astype(int))


def test_values_that_a_function_closes_over():
    held = jnp.arange(64.0).reshape(16, 4)
    step = gshard.jit(lambda x: gshard.split(held, 0, 8) + x)
    for _ in range(3):  # the first call, and the quick way
        np.testing.assert_array_equal(step(X), np.asarray(held) + X)
    assert step.lower(X).compile().memory_analysis().argument_size_in_bytes == 2 * X.nbytes // 8


def test_the_quick_way_is_taken_only_where_nothing_is_wrapped():
    """Every call gives the values of the first, whatever order its devices are in."""
    order = np.array([3, 1, 4, 0, 5, 7, 2, 6])
    for fn in (
        lambda x: gshard.shard(x, order.reshape(8, 1)) * 2,
        lambda x: gshard.replicate(gshard.shard(x, order.reshape(8, 1))) * 2,
        lambda x: gshard.split(x, 0, 3) * 2,
    ):
        step = gshard.jit(fn)
        for x in (X, X + 1, jnp.asarray(X), jnp.asarray(X) + 1):
            for _ in range(3):
                np.testing.assert_array_equal(np.asarray(step(x)), np.asarray(x) * 2)


def test_what_is_wrapped_goes_the_quick_way_inside(monkeypatch):
    """Python places and executes for the first call alone, with wrapped arguments or without."""
    uneven = X[:13]
    ran = []
    execute = gshard.runtime.stages._jax.execute
    monkeypatch.setattr(
        gshard.runtime.stages._jax, "execute", lambda *args: ran.append(1) or execute(*args)
    )
    for x, fn in (
        (X, lambda x: gshard.split(gshard.split(x, 0, 8)[:13] * 2, 0, 8)),
        (uneven, lambda x: gshard.split(x, 0, 8) * 2),
    ):
        compiled = gshard.jit(fn).lower(x).compile()
        placed = compiled.place(x)
        ran.clear()
        for _ in range(3):
            result = compiled(*placed)
            assert isinstance(result, gshard.UnevenArray)
            np.testing.assert_array_equal(np.asarray(result), 2 * uneven)
        assert len(ran) == 1
        np.testing.assert_array_equal(np.asarray(compiled(x + 1)), 2 * (uneven + 1))
        with pytest.raises(TypeError, match="was compiled for arrays of the types"):
            compiled(x.astype(np.int32))


@shows("random keys")
def test_random_keys():
    key = jax.random.key(0)
    step = gshard.jit(lambda k: gshard.split(jax.random.normal(k, (16, 4)), 0, 8))
    for _ in range(3):
        np.testing.assert_allclose(run(step, key), jax.random.normal(key, (16, 4)), rtol=1e-6)
    keys = gshard.jit(lambda k: gshard.split(jax.random.split(k, 8), 0, 8))(key)
    again = gshard.jit(lambda k: k)(keys)
    np.testing.assert_array_equal(
        jax.random.key_data(again), jax.random.key_data(jax.random.split(key, 8))
    )
