"""What is computed by element is computed in the tiles of those who read it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from tests.oracle import annotated, check, even_split, kinds, random_array, sent


def limited(u, mode="edge"):
    q = jnp.pad(u, ((2, 2), (0, 0)), mode=mode)
    d = q[1:] - q[:-1]
    slope = jnp.where(d[1:] * d[:-1] > 0, jnp.minimum(jnp.abs(d[1:]), jnp.abs(d[:-1])), 0)
    flux = q[1:-2] + 0.5 * slope[:-1]
    return u - 0.1 * (flux[1:] - flux[:-1])


ROWS = {"inputs": [even_split(2, 0, 8)], "outputs": [even_split(2, 0, 8)]}


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
def test_a_limiter_sends_the_rows_at_borders(mode):
    """Two from before a tile and one from behind it, whatever is beyond the ends."""
    fn = functools.partial(limited, mode=mode)
    low = check(fn, random_array((64, 3)), **ROWS, rtol=1e-5, atol=1e-5)
    assert set(kinds(low)) == {"collective_permute"}
    assert sent(low) == 3 * 12, low.collectives


def test_where_tiles_have_padding():
    """61 rows are in tiles of 8."""
    low = check(limited, random_array((61, 3)), **ROWS, rtol=1e-5, atol=1e-5)
    assert sent(low) <= 4 * 12, low.collectives


def test_a_gradient_with_windows_of_zeros():
    """Windows of numbers alone are compared, too: JAX's `Literal` has no hash."""

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(limited(u, "constant") ** 2))(u)

    low = check(gradient, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert sent(low) <= 7 * 12, low.collectives


def test_rows_made_of_a_column_and_a_row():
    """No operand of the comparison has its shape: the largest of each row, and a number's own."""

    def fn(x):
        hot = jax.nn.one_hot(jnp.argmax(x, 1), x.shape[1])
        return jnp.sin(jnp.pad(hot * x, ((1, 0), (0, 0))))[:-1]

    check(fn, random_array((9, 12)), devices=2, inputs=[even_split(2, 0, 2)])


def test_a_row_for_all_is_read_as_it_is():
    """Windows of rows to which a slice of their sums is added: it has one row for all of theirs."""

    def fn(x):
        x = (x + 0.1 * x.sum(1, keepdims=True))[:, 1:12]
        x = jnp.clip(x * x, -50, 50)[:, 2:10]
        return jnp.sin(x), lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID")

    def gradient(x):
        return jax.grad(lambda x: sum(y.sum() for y in fn(x[:7])))(x)

    for each in (fn, gradient):
        check(each, random_array((9, 13)), devices=4, inputs=[even_split(2, 1, 4)], rtol=1e-4)


def test_what_is_read_otherwise_stays(tmp_path):
    """The sum of all rows needs the tensor itself."""

    def fn(u):
        d = jnp.tanh(jnp.pad(u, ((2, 2), (0, 0))))
        return d[1:-3], d.sum()

    struct = jax.ShapeDtypeStruct((64, 3), jnp.float32)
    low = gshard.jit(annotated(fn, [even_split(2, 0, 8)]), devices=8).lower(struct)
    (text,) = (p.read_text() for p in low.dump(tmp_path) if "row_spaces" in p.name)
    assert "# not applied: no rows would stay in their tiles" in text


def fluxes(u):
    f = jnp.tanh(u[1:] - u[:-1])
    return u.at[1:-1].add(0.1 * ((f * f + f)[1:] - (f * f + f)[:-1]))


def coefficients(u):
    """A number for each row, which is the same for all columns."""
    x = jnp.linspace(0, 1, u.shape[0])[1:-1, None]
    return u.at[1:-1].add(x * (u[2:] + u[:-2] - 2 * u[1:-1]))


def staggered(u):
    """Fluxes between rows, a row less than there are, are carried as well."""

    def step(_, state):
        u, f = state
        f = f + 0.5 * (u[1:] - u[:-1])
        return u.at[1:-1].add(0.5 * (f[1:] - f[:-1])), f

    return jax.lax.fori_loop(0, 3, step, (u, jnp.zeros((u.shape[0] - 1, u.shape[1]))))[0]


def two_fields(u):
    q = jnp.stack([u * u + 1, u])
    v = q[1] / q[0]
    f = jnp.stack([q[1], q[1] * v + q[0]])
    between = 0.5 * (f[:, 1:] + f[:, :-1]) - 0.1 * (q[:, 1:] - q[:, :-1])
    return q.at[:, 1:-1].add(-0.1 * (between[:, 1:] - between[:, :-1])).sum(0)


# Rows that a device sends at most, forwards.
OTHERS = {
    "fluxes": (fluxes, 2),
    "coefficients": (coefficients, 2),
    "staggered": (staggered, 3 * 2),
    "two fields": (two_fields, 6),
    "fourth differences": (lambda u: u.at[2:-2].add(jnp.diff(u, n=4, axis=0)), 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_spellings(name):
    fn, rows = OTHERS[name]
    low = check(fn, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert sent(low) <= rows * 12, low.collectives
    check(fn, random_array((61, 3)), **ROWS, rtol=1e-4, atol=1e-4)


def test_between_rows_of_another_tensor():
    """Rows that are spread are not next to each other in a place, either."""

    def fn(x):
        x = x.at[:4].add(2 * jnp.sin(x[:4]))
        x = x.at[7:].add(2 * jnp.sin(x[7:]))
        y = jax.lax.pad(x, 0.5, [(2, 1, 1)])
        return y.at[1:-1].add(y[:-2] - 2 * y[2:])

    check(fn, random_array((8,)), devices=2, outputs=[even_split(1, 0, 2)])


@pytest.mark.parametrize("shift", [2, 0])
def test_rows_are_read_in_the_place_that_has_all_of_them(shift):
    """Of the two rows that a roll brings back, a place at the border has one, and garbage."""

    def fn(x):
        def loss(x):
            y = x[:, 2:12]
            return jnp.sum(jnp.sin(jnp.roll(y, -shift, 1)) + jnp.cos(y))

        return jax.grad(loss)(gshard.split(x, 1, 2))

    check(fn, random_array((4, 13)), devices=2, rtol=1e-5)


def test_numbers_made_of_rows_that_others_place():
    """The gradient of a number reads the rows as they are, and the update has them in its place."""

    def fn(x):
        x = gshard.split(x, 0, 4)
        y = jnp.cos(jax.lax.stop_gradient(x)[:3])
        return jax.grad(lambda x: jnp.sum(jnp.sin(x.at[:3].add(y * x.sum())) ** 2))(x)

    check(fn, random_array((4,)), devices=4, rtol=1e-4, atol=1e-4)


def quotients(u):
    """A reconstruction whose weights are quotients, with three rows around the field."""
    q = jnp.concatenate([u[:1]] * 3 + [u] + [u[-1:]] * 3)
    left, right = q[1:-1] - q[:-2], q[2:] - q[1:-1]
    a, b = 1 / (0.1 + left**2), 1 / (0.1 + right**2)
    face = q[1:-1] + 0.5 * (a * left + b * right) / (a + b)
    return u - 0.1 * (face[2:-2] - face[1:-3])


def rusanov(u, mode="edge"):
    """States on both sides of a face, each with a limited slope."""
    q = jnp.pad(u, ((2, 2), (0, 0)), mode=mode)
    behind, ahead = q[1:-1] - q[:-2], q[2:] - q[1:-1]
    safe = jnp.where(behind * ahead > 0, behind + ahead, 1)
    slope = jnp.where(behind * ahead > 0, 2 * behind * ahead / safe, 0)
    left, right = (q[1:-1] + 0.5 * slope)[:-1], (q[1:-1] - 0.5 * slope)[1:]
    speed = jnp.maximum(jnp.abs(left), jnp.abs(right))
    flux = 0.25 * (left**2 + right**2) - 0.5 * speed * (right - left)
    return u - 0.1 * (flux[1:] - flux[:-1])


GRADIENTS = {
    "rusanov": rusanov,
    "edge": functools.partial(limited, mode="edge"),
    "reflect": functools.partial(limited, mode="reflect"),
    "constant": functools.partial(limited, mode="constant"),
    "wrap": functools.partial(limited, mode="wrap"),
    "quotients": quotients,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_limiter(name):
    """Rows at the borders of the field are computed by themselves, in the tile that has them."""

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(GRADIENTS[name](u) ** 2))(u)

    low = check(gradient, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert sent(low) <= (10 if name == "rusanov" else 7) * 12, low.collectives
    check(gradient, random_array((61, 3)), **ROWS, rtol=1e-4, atol=1e-4)


def two_steps(u, mode="edge"):
    """Lax-Wendroff in both dims: half a step on each face, whose borders are cut off afterwards."""
    q = jnp.pad(u, 1, mode=mode)
    f = 0.5 * q * q
    x = 0.5 * (q[1:] + q[:-1]) - 0.1 * (f[1:] - f[:-1])
    y = 0.5 * (q[:, 1:] + q[:, :-1]) - 0.1 * (f[:, 1:] - f[:, :-1])
    x, y = 0.5 * x * x, 0.5 * y * y
    return u - 0.2 * (x[1:] - x[:-1])[:, 1:-1] - 0.2 * (y[:, 1:] - y[:, :-1])[1:-1]


@pytest.mark.parametrize("mode", ["edge", "wrap", "constant"])
def test_the_gradient_of_two_steps_in_two_dims(mode):
    """Two rows and two columns each way of the field and of the gradient, and some corners."""

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(jnp.sin(two_steps(u, mode))))(u)

    tiles = [np.arange(8).reshape(2, 4)]
    how = {"inputs": tiles, "outputs": tiles, "rtol": 1e-4, "atol": 1e-4}
    low = check(gradient, random_array((128, 96)), **how)
    # On a ring, a row goes three times one way.
    most = 1.11 if mode == "wrap" else 1.1
    assert sent(low) <= most * 4 * 4 * (24 + 64), low.collectives


def test_the_gradient_of_two_limiters_at_edges():
    """A row that is repeated at the border is that row as often, in a tensor as wide as that."""

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(limited(limited(u)) ** 2))(u)

    low = check(gradient, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert "all_gather" not in kinds(low)


def test_row_maps_of_row_maps_that_stay():
    """Windows of spread rows, in places and as they are; a row that loses its dim, in zeros."""

    def fn(x):
        y = jax.lax.pad(x[:, 7:12:2], 0.5, [(2, 1, 0), (2, 1, 1)])
        y = y.at[1:-1, 1:-1].add(y[:-2, 1:-1] - 2 * y[2:, 1:-1])
        return jax.lax.pad(y, 0.5, [(0, 1, 1), (0, 1, 0)])

    for rows in (1, 2, 8):
        tiles = np.arange(8).reshape(rows, 8 // rows)
        check(fn, random_array((16, 13)), inputs=[tiles[:1, :2]], outputs=[tiles])

    def changed(x):
        x = jnp.gradient(x.at[:, 6].set(2 * jnp.take(x, 0, 1)), axis=1)
        return jnp.sum(jnp.sin(jnp.diff(x, axis=1, prepend=0.0)))

    tiles = np.arange(3).reshape(1, 3)
    check(jax.grad(changed), random_array((3, 16)), devices=4, inputs=[tiles], rtol=1e-4)


# ---------------------------------------------------------------- fields that a loop holds

POINTS, BETWEEN = random_array((65, 3)), random_array((64, 3), seed=1)


def waves(points, between):
    """Differences of either are added to the other."""

    def step(_, state):
        points, between = state
        between = between + 0.5 * (points[1:] - points[:-1])
        return points.at[1:-1].add(0.5 * (between[1:] - between[:-1])), between

    return jax.lax.fori_loop(0, 10, step, (points, between))


def pressures(faces, cells):
    """The gradient of cells with edges; a loop's constants have as many rows."""
    weight = jnp.cos(cells)

    def step(state, _):
        faces, cells = state
        cells = cells - 0.1 * weight * jnp.diff(faces, axis=0)
        around = jnp.concatenate([cells[:1], cells, cells[-1:]])
        return (faces - 0.1 * jnp.diff(around, axis=0), cells), None

    return jax.lax.scan(step, (faces, cells), None, length=10)[0]


@pytest.mark.parametrize("fn", [waves, pressures])
@pytest.mark.parametrize("rows", [64, 61])
def test_staggered_fields_are_held_in_tiles_that_begin_alike(fn, rows):
    """Two rows in each step; and all fields move once before the loop, and once after it."""
    split = even_split(2, 0, 8)
    args = POINTS[: rows + 1], BETWEEN[:rows]
    low = check(fn, *args, inputs=[split] * 2, outputs=[split] * 2, rtol=1e-4, atol=1e-4)
    assert sent(low) <= (10 * 2 + 3 * 7) * 12, low.collectives


@pytest.mark.parametrize("rows", [64, 61])
def test_fields_that_a_while_loop_holds(rows, tmp_path):
    """Its condition reads a field, and a constant; the body has constants of its own.

    Tiles of 62 and 61 rows begin alike as they are: nothing is moved before the loop, or after it.
    """
    split = even_split(2, 0, 8)

    def fn(points, between, most, weight):
        def unsettled(state):
            _, between, number = state
            return (number < most) & (jnp.abs(between).max() < 100.0)

        def step(state):
            points, between, number = state
            between = between + 0.5 * weight * (points[1:] - points[:-1])
            return points.at[1:-1].add(between[1:] - between[:-1]), between, number + 1

        return jax.lax.while_loop(unsettled, step, (points, between, 0))

    args = POINTS[: rows + 1], BETWEEN[:rows], jnp.int32(3), jnp.cos(BETWEEN[:rows])
    how = {"inputs": [split, split, None, split], "outputs": [split, split, None]}
    low = check(fn, *args, **how, rtol=1e-4, atol=1e-4)
    (text,) = (p.read_text() for p in low.dump(tmp_path) if "row_spaces" in p.name)
    assert ("fields are held with as many rows" in text) == (rows == 64)
    assert sent(low) <= (2 + (4 * 7 if rows == 64 else 0)) * 12 + 8, low.collectives


@pytest.mark.parametrize("tiles", [(2, 4), (4, 2)])
def test_staggered_fields_in_two_dims(tiles):
    """Every field has a row or a column less than the points; results are not annotated."""

    def fn(ez, hx, hy):
        def step(_, state):
            ez, hx, hy = state
            hx = hx - 0.5 * (ez[:, 1:] - ez[:, :-1])
            hy = hy + 0.5 * (ez[1:] - ez[:-1])
            curl = hy[1:, 1:-1] - hy[:-1, 1:-1] - hx[1:-1, 1:] + hx[1:-1, :-1]
            return ez.at[1:-1, 1:-1].add(0.5 * curl), hx, hy

        return jax.lax.fori_loop(0, 20, step, (ez, hx, hy))

    args = random_array((33, 17)), random_array((33, 16), seed=1), random_array((32, 17), seed=2)
    grid = np.arange(8).reshape(tiles)
    low = check(fn, *args, inputs=[grid] * 3, rtol=1e-3, atol=1e-3)
    local = -(-33 // tiles[0]), -(-17 // tiles[1])
    assert sent(low) <= (20 + 10) * 2 * 4 * sum(local), low.collectives


def test_the_gradient_of_staggered_fields():
    def loss(points, between):
        return sum(jnp.sum(jnp.sin(x)) for x in waves(points, between))

    check(jax.grad(loss, (0, 1)), POINTS, BETWEEN, inputs=[even_split(2, 0, 8)] * 2, rtol=1e-4)


def test_fields_that_are_read_otherwise_are_held_as_they_are(tmp_path):
    """Rows are summed up, and sorted: rows too many would be in the way."""

    def fn(points, between):
        def step(_, state):
            points, between = state
            return points + between.sum(), jnp.sort(between, axis=0)

        return jax.lax.fori_loop(0, 3, step, (points, between))

    low = check(fn, POINTS, BETWEEN, inputs=[even_split(2, 0, 8)] * 2, rtol=1e-4, atol=1e-4)
    (text,) = (p.read_text() for p in low.dump(tmp_path) if "row_spaces" in p.name)
    assert "as many rows" not in text
