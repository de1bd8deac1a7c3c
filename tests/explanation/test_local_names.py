"""The values of the per-device program are called what the user's code calls them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from tests.explanation.test_names import named


def explained(fn, *arguments, devices=4):
    """What each operator makes, by the names of its value, and their shapes."""
    lowered = gshard.jit(fn, devices=devices).lower(*arguments)
    explanation = lowered.explain("h100", seconds=0)
    names = explanation.local_names
    return [
        (t.collective or t.name.split()[0], names.name(t.value), names.shape(t.value))
        for t in explanation.forecast.operators
    ]


def of_shapes(*shapes):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]


def test_collectives_are_called_by_what_they_send():
    def fn(x, weights):
        h = jax.nn.relu(gshard.split(x, 0, 4) @ weights["in"])
        y = h @ gshard.split(weights["out"], 0, 4)
        return y

    x, inner, outer = of_shapes((8, 16), (16, 64), (64, 8))
    found = explained(fn, x, {"in": inner, "out": outer})
    assert ("all_gather", "weights['out']", "f32[64,8]") in found
    assert [name for kind, name, _ in found if kind == "dot_general"][1] == "y"


def test_a_value_within_an_expression_is_called_by_its_text():
    def fn(x, w):
        return jnp.tanh(gshard.split(x, 0, 4) @ w) * 2

    names = [name for _, name, _ in explained(fn, *of_shapes((8, 16), (16, 4)))]
    assert names[0] == "gshard.split(x, 0, 4) @ w"
    assert names[-1] == "jnp.tanh(gshard.split(x, 0, 4) @ w) * 2"


def test_gradients_are_not_called_by_the_name_of_their_value():
    def loss(w, x):
        h = jnp.tanh(gshard.split(x, 0, 4) @ w)
        return jnp.sum(h**2)

    found = explained(jax.value_and_grad(loss), *of_shapes((16, 8), (8, 16)))
    assert [name for _, name, _ in found].count("h") == 1
    sent = [name for kind, name, _ in found if kind == "all_reduce"]
    assert len(sent) == 1
    assert "gradient through gshard.split(x, 0, 4) @ w" in sent[0]
    assert "jnp.sum(h**2)" in sent[0]


def test_values_in_loops_have_names_forward_and_backward():
    def loss(layers, x):
        def body(carry, w):
            carry = jnp.tanh(carry @ w)
            return carry, None

        y, _ = jax.lax.scan(body, gshard.split(x, 0, 4), layers)
        return jnp.sum(y)

    names = [n for _, n, _ in explained(jax.grad(loss), *of_shapes((3, 8, 8), (16, 8)))]
    assert "carry" in names
    assert "gradient through carry @ w" in names
    assert names.count("carry @ w") == 1
    assert "for the gradient of jnp.tanh(carry @ w)" in names


def test_a_function_called_twice_names_both_results():
    def layer(x, w):
        y = jnp.tanh(x @ w)
        return y

    def fn(x, w):
        return layer(layer(gshard.split(x, 0, 4), w), w)

    found = explained(fn, *of_shapes((8, 16), (16, 16)))
    assert [name for _, name, _ in found].count("y") == 2


def test_augmented_and_tuple_assignments_name_their_targets():
    def fn(x):
        a, (b, c) = jnp.cumsum(x, 1), (jnp.cumsum(x * 2, 1), jnp.cumsum(x * 3, 1))
        a += jnp.cumsum(b, 1)
        return gshard.split(a, 0, 4), c

    subject, names = named(fn, (8, 4))
    found = [names.name(e.outvars[0]) for e in subject.equations]
    assert [name for name in found if name] == ["a", "b", "c", "a", "a"]


def test_dims_of_local_values_have_the_letters_of_names_and_einsums():
    def fn(x_GSM, w):
        y = jnp.einsum("gsm,mh->gsh", gshard.split(x_GSM, 0, 4), w)
        z_GSH = jnp.tanh(y)
        return z_GSH

    shapes = [shape for *_, shape in explained(fn, *of_shapes((4, 8, 16), (16, 32)))]
    assert shapes == ["f32[g=1,s=8,h=32]", "f32[G=1,S=8,H=32]"]


def test_dims_that_a_partition_spec_splits_are_called_by_their_mesh_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    specs = PartitionSpec("data"), PartitionSpec(None, ("data", "model"))

    def fn(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, specs[0]))
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, specs[1]))
        each = NamedSharding(mesh, PartitionSpec("model"))
        rows = jax.vmap(lambda row: jax.lax.with_sharding_constraint(row, each))(x)
        return rows @ w

    lowered = gshard.jit(fn).lower(*of_shapes((8, 16), (16, 8)))
    explanation = lowered.explain("h100", seconds=0)
    found = [explanation.names.dims(e.outvars[0]) for e in explanation.subject.annotations]
    assert found == [("data", ""), ("", "data and model"), ("", "model")]
    assert "by data" in str(explanation)
