"""Values and dims are called what the code calls them."""

import jax
import jax.numpy as jnp

import gshard
from gshard.explanation.names import Names


def named(fn, *shapes, devices=4):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    lowered = gshard.jit(fn, devices=devices).lower(*arguments)
    subject = lowered._program.subject
    return subject, Names(subject)


def test_annotations_are_called_by_their_argument_or_their_result():
    def fn(x, pair):
        a, b = gshard.split(x, 0, 4), gshard.split(x.T, 1, 4)
        c = gshard.replicate(a + b.T)
        return gshard.split(c * 2, 0, 4)

    subject, names = named(fn, (8, 4), (2,))
    found = [names.name(e.outvars[0]) for e in subject.annotations]
    assert found == ["x", "x.T", "c", ""]


def test_arguments_and_assigned_values_have_names_and_others_their_shape():
    def fn(x):
        doubled = jnp.tanh(x) * 2
        return jnp.sum(doubled, 0)

    subject, names = named(fn, (8, 4))
    by_name = {names.name(v): v for e in subject.equations for v in e.outvars}
    assert names.name(subject.flat.jaxpr.invars[0]) == "x"
    assert by_name["doubled"].aval.shape == (8, 4)
    first = subject.equations[0].outvars[0]
    assert names.value(first) == "f32[8,4]"


def test_dims_have_the_letters_of_an_einsum_or_of_the_name():
    def fn(x_GSM, w):
        y = jnp.einsum("gsm,mh->gsh", x_GSM, w)
        z = gshard.split(jnp.einsum("gsh,gth->gst", y, y), 0, 4)
        return z

    subject, names = named(fn, (4, 8, 16), (16, 32))
    x, w = subject.flat.jaxpr.invars
    assert names.dims(x) == ("G", "S", "M")
    assert names.dims(w) == ("m", "h")
    assert names.dim(subject.annotations[0].outvars[0], 2) == "t"


def test_a_dim_without_a_letter_has_its_number():
    subject, names = named(lambda x: x * 2, (4, 8))
    assert names.dim(subject.flat.jaxpr.invars[0], 1) == "dim 1"


def test_an_operand_of_several_einsums_has_the_letters_that_fit_all_of_them():
    def fn(x, gate):
        p = jnp.einsum("gsm,me->gse", x, gate)
        return jnp.einsum("gse,gsm->egsm", p, x)  # x alone could be gse or gsm here

    subject, names = named(fn, (4, 8, 16), (16, 4))
    assert names.dims(subject.flat.jaxpr.invars[0]) == ("g", "s", "m")


def test_arguments_annotated_by_one_call_in_a_tree_map_have_their_own_names():
    def fn(params):
        params = jax.tree.map(lambda w: gshard.split(w, 0, 4), params)
        return params["a"] @ params["b"].T

    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    subject = gshard.jit(fn, devices=4).lower({"a": shape, "b": shape})._program.subject
    names = Names(subject)
    found = {names.name(e.outvars[0]) for e in subject.annotations}
    assert found == {"params['a']", "params['b']"}
