"""What XLA's programs send: groups in every form that HLO has, loops, lines, and as accelerators
run them; the oracle is the arithmetic of meshes."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gshard.explanation.hlo import HloProgram, collectives_of_hlo


def compiled(fn, mesh, into, out, *shapes, dtype="float32"):
    specs = tuple(NamedSharding(mesh, s) for s in into)
    structs = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    program = jax.jit(fn, in_shardings=specs, out_shardings=NamedSharding(mesh, out))
    return program.lower(*structs).compile().as_text()


def found(text, **how):
    return [
        (c.kind, c.bytes, c.count, {frozenset(g) for g in t.groups})
        for c, t in HloProgram(text, 8, **how).collectives()
    ]


def test_groups_of_a_part_of_the_mesh_and_trip_counts_and_lines():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def body(carry, w):
        return jnp.tanh(carry @ w), None  # the AllReduce over x

    text = compiled(
        lambda x, ws: jax.lax.scan(body, x, ws)[0],
        *(mesh, (P("y"), P(None, "x")), P("y")),
        *((16, 32), (5, 32, 32)),
    )
    (reduce,) = [c for c in collectives_of_hlo(text, 8) if c.kind == "all_reduce"]
    assert (reduce.group_size, reduce.total_bytes) == (2, 5 * (16 // 4) * 32 * 4)
    first = inspect.getsourcelines(body)[1]
    assert reduce.source == f"tests/explanation/test_hlo.py:{first + 1}"
    assert reduce.reason == "XLA: for dot_general"
    program = HloProgram(text, 8)
    assert program.product_flops() == 5 * 2 * (16 // 4) * 32 * 32 // 2


def test_as_accelerators_run_it():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    product = (jnp.matmul, mesh, (P(None, ("x", "y")), P(("x", "y"))))
    text = compiled(*product, P(("x", "y")), (16, 32), (32, 32))
    everybody = {frozenset(range(8))}
    assert found(text) == [("all_reduce", 2 * 2048 * 7 // 8, 1, everybody)]
    assert found(text, accelerator=True) == [("reduce_scatter", 2048 * 7 // 8, 1, everybody)]
    # All of the sum is used: it stays an AllReduce, and 16-bit floats are sent in 16 bits.
    text = compiled(*product, P(), (16, 32), (32, 32), dtype="bfloat16")
    (wide,), (narrow,) = found(text), found(text, accelerator=True)
    assert wide == ("all_reduce", 2 * 2048 * 7 // 8, 1, everybody)
    assert narrow == ("all_reduce", 2 * 1024 * 7 // 8, 1, everybody)


LINE = "  %r = f32[64]{0} all-gather(%p), replica_groups=@, dimensions={0}"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=4,'b'=2] {'a'}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("mesh['a'=4,'b'=2] {'b','a'}", [(0, 2, 4, 6, 1, 3, 5, 7)]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=4], device_ids=(3,1,0,2,7,5,4,6) {'a'}", [(3, 7), (1, 5), (0, 4), (2, 6)]),
        ("mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=8] {'a':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_every_form_of_groups(text, groups):
    ((collective, moved),) = HloProgram(LINE.replace("@", text), 8).collectives()
    assert set(moved.groups) == set(groups)
    members = len(groups[0])
    assert collective.bytes == 256 // members * (members - 1)


@given(st.permutations([2, 4, 2]), st.sets(st.integers(0, 2), min_size=1))
def test_groups_of_any_mesh_are_those_of_numpy(sizes, over):
    axes = ",".join(f"'a{d}'={n}" for d, n in enumerate(sizes))
    used = ",".join(f"'a{d}'" for d in sorted(over))
    line = LINE.replace("@", f"mesh[{axes}] {{{used}}}")
    ((_, moved),) = HloProgram(line, 16).collectives()
    kept = [d for d in range(3) if d not in over]
    ids = np.arange(16).reshape(sizes).transpose(*kept, *sorted(over))
    wanted = ids.reshape(-1, np.prod([sizes[d] for d in sorted(over)]))
    assert moved.groups == tuple(map(tuple, wanted.tolist()))


def test_the_older_form_of_lines_and_none():
    line = LINE.replace("@", "[1,8]<=[8]")
    old = line + ', metadata={op_name="f/dot" source_file="/a/model.py" source_line=7}'
    assert [c.source for c in collectives_of_hlo(old, 8)] == ["/a/model.py:7"]
    assert [c.source for c in collectives_of_hlo(line, 8)] == ["unknown"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "(f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%a), channel_id=1, "
            "replica_groups=[1,8]<=[8], dimensions={0}",
            ("all_gather", 7 * 4 * 8 * 4),
        ),
        (
            "(f32[4,8]{1,0}, f32[2,8]{1,0}) all-reduce-start(%a, %b), channel_id=1, "
            "replica_groups=[1,8]<=[8], to_apply=%add",
            ("all_reduce", 2 * (4 + 2) * 8 * 4 * 7 // 8),
        ),
        (
            "(f32[4,8]{1,0}, f32[4,8]{1,0}) collective-permute-start(%a), channel_id=1, "
            "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}",
            ("collective_permute", 4 * 8 * 4),
        ),
    ],
    ids=["gather", "two sums", "permute"],
)
def test_collectives_that_are_started_as_on_gpus(line, expected):
    text = f"""HloModule jit_f, num_partitions=8

ENTRY %main (a: f32[4,8], b: f32[2,8]) -> f32[4,8] {{
  %a = f32[4,8]{{1,0}} parameter(0)
  %b = f32[2,8]{{1,0}} parameter(1)
  %started = {line}
  ROOT %done = f32[4,8]{{1,0}} copy(%a)
}}
"""
    ((kind, size, count, _),) = found(text)
    assert (kind, size, count) == (*expected, 1)
