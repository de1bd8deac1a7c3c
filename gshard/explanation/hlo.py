"""A program that XLA compiled, read from its HLO text: what it sends, because of which line.

Both partitioners are measured alike: bytes that one device sends, times the trip counts of the
enclosing loops.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gshard.explanation.profiled import HloPlace
from gshard.forecast.collective import KINDS
from gshard.graph.reason import Reason
from gshard.graph.source import shown_line
from gshard.moving.inventory import Collective, Transfer
from gshard.tensors.devices import Groups

_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w\-]*)\((?P<rest>.*)"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d+(?:e\d+m\d+\w*)?|pred)\[(?P<dims>[\d,]*)\]")
_COMBINED = ("all_gather", "all_reduce", "reduce_scatter")
_MOST_COMBINED = 30 * 2**20  # bytes, XLA's default for GPUs
_SAME_VALUE = ("bitcast", "convert", "copy", "get-tuple-element", "reshape", "transpose")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    computation: str
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    text: str

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The dtype and sizes of each result."""
        return [(m["dtype"], _numbers(m["dims"])) for m in _SHAPE.finditer(self.type)]

    @property
    def size(self) -> int:
        """The bytes of its results."""
        return sum(_width(dtype) * math.prod(dims) for dtype, dims in self.shapes)

    def attribute(self, pattern: str) -> str:
        """The group of a pattern in its attributes; "" without a match."""
        found = re.search(pattern, self.text)
        return found[1] if found else ""


Values = list[tuple[Collective, Transfer]]
Made = tuple[Instruction, Values]  # a collective, and the values that it combines


class HloProgram:
    """A compiled program of `num_devices` devices.

    XLA's compiler for CPUs differs from those for accelerators in three ways that count: it keeps
    an AllReduce of which each device uses its own slice, where the others make a ReduceScatter, it
    widens 16-bit floats, and it combines fewer collectives. With `accelerator`, all three are
    counted as accelerators run them.
    """

    def __init__(self, text: str, num_devices: int, accelerator: bool = False):
        self._text, self._num_devices, self._accelerator = text, num_devices, accelerator
        self._instructions = list(_instructions(text))
        self._by_name = {i.name: i for i in self._instructions}

    def collectives(self) -> Iterator[tuple[Collective, Transfer]]:
        """What it sends, and how: with the trip counts of the loops."""
        made = list(self._made())
        groups: list[list[Made]] = []
        for found, values in made:
            fitting = (g for g in groups if self._accelerator and self._joins(g, found, values))
            if group := next(fitting, None):
                group.append((found, values))
            else:
                groups.append([(found, values)])
        for group in groups:
            yield _combined([value for _, values in group for value in values])

    def _made(self) -> Iterator[Made]:
        """The collectives as they are in the program, those of several kinds as several."""
        for found in self._instructions:
            kind = found.op.removesuffix("-start").replace("-", "_")
            if kind not in KINDS:
                continue
            values = [self._value(found, kind, *value) for value in self._values(found)]
            for of_kind in dict.fromkeys(moved.kind for _, moved in values):
                members = [(c, t) for c, t in values if t.kind == of_kind and c.bytes]
                if members:
                    yield found, members

    def product_flops(self) -> float:
        """The arithmetic of its products, on one device."""
        found = 0.0
        for product in (i for i in self._instructions if i.op in ("dot", "convolution")):
            left, right = (self._by_name[name].shapes[0][1] for name in product.operands[:2])
            if product.op == "dot":
                over = _numbers(product.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
                inner = math.prod(left[d] for d in over)
            else:  # each result has all of a kernel's elements for one output feature
                kernel = product.attribute(r"dim_labels=\w+_(\w+)->")
                inner = math.prod(right) // right[kernel.index("o")]
            runs = self._runs(product.computation)
            found += 2.0 * runs * inner * math.prod(product.shapes[0][1])
        return found

    def places(self) -> dict[str, HloPlace]:
        """The line, operator and runs of each instruction, by its name."""
        lines = {i: self._line(i) for i in self._instructions}
        return {
            i.name: HloPlace(
                "unknown" if "<" in line else line, i.op, self._runs(i.computation, unknown=0)
            )
            for i, line in lines.items()
        }

    def _values(self, found: Instruction) -> Iterator[tuple[Instruction, str, int]]:
        """The values that a collective combines: each with its own line, its dtype and bytes."""
        started = found.op.endswith("-start")
        if started or found.op == "all-to-all" or len(found.shapes) == 1:
            # The type of what is started has its operands first; that of an AllReduce has not.
            both = started and len(found.shapes) > 1 and found.op != "all-reduce-start"
            given = found.shapes[: len(found.operands)] if both else ()
            size = found.size - sum(_width(dtype) * math.prod(dims) for dtype, dims in given)
            yield found, found.shapes[0][0], size
            return
        taken = {
            int(user.attribute(r"index=(\d+)")): user
            for user in self._users.get((found.computation, found.name), [])
            if user.op == "get-tuple-element"
        }
        for number, (dtype, dims) in enumerate(found.shapes):
            yield taken.get(number, found), dtype, _width(dtype) * math.prod(dims)

    def _value(
        self, found: Instruction, kind: str, value: Instruction, dtype: str, size: int
    ) -> tuple[Collective, Transfer]:
        """One value of a collective: of `size` bytes in the result, which HLO has the type of."""
        pairs = re.findall(r"\{(\d+),(\d+)\}", found.attribute(r"source_target_pairs=\{(.*?\})\}"))
        groups = tuple((int(a), int(b)) for a, b in pairs) or self._groups(found)
        moved = Transfer(kind, size, dtype, groups)
        members = moved.members(self._num_devices)
        operand = {"all_gather": size // members, "reduce_scatter": size * members}.get(kind, size)
        moved = replace(moved, size=operand)
        if self._accelerator:
            if dtype == "f32" and self._is_widened(found):
                moved = replace(moved, size=operand // 2, dtype="bf16")
            if kind == "all_reduce" and self._is_sliced(value, size // members):
                moved = replace(moved, kind="reduce_scatter")
        scopes = value.attribute(r'op_name="([^"]*)"') or found.attribute(r'op_name="([^"]*)"')
        way = " (backward)" if "transpose(" in scopes else ""
        reason = Reason("step", "XLA", f"for {scopes.rpartition('/')[2] or 'unknown'}{way}")
        runs, sent = self._runs(found.computation), moved.sent(self._num_devices)
        line = self._line(value)
        line = self._line(found) if line == "unknown" else line
        return Collective(moved.kind, sent, runs, members, moved.dtype, line, reason), moved

    # ------------------------------------------------------------ lines

    def _line(self, found: Instruction) -> str:
        """The user's line: in the instruction, or since JAX 0.10 as the number of a stack frame."""
        here = re.search(r'source_file="([^"]*)" source_line=(\d+)', found.text)
        frame = found.attribute(r"stack_frame_id=(\d+)")
        if here or not frame:
            return shown_line([(here[1], int(here[2]), "")] if here else [])
        return shown_line(list(self._frames_from(int(frame))))

    def _frames_from(self, number: int) -> Iterator[tuple[str, int, str]]:
        """Files, lines and functions of a stack, the innermost first."""
        while number in self._frames:
            place, outer = self._frames[number]
            file, function, line = self._places[place]
            yield self._names["File"][file], line, self._names["Function"][function]
            # XLA prints the parent's number plus one, so that 1 is none.
            number = outer - 1 if outer - 1 < number else 0

    @functools.cached_property
    def _names(self) -> dict[str, dict[str, str]]:
        listed = re.findall(r"^(File|Function)Names\n(.*?)\n\n", self._text, re.M | re.S)
        return {kind: dict(re.findall(r'^(\d+) "(.*)"$', names, re.M)) for kind, names in listed}

    @functools.cached_property
    def _places(self) -> dict[int, tuple[str, str, int]]:
        listed = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
        found = re.findall(listed, self._text, re.M)
        return {int(n): (file, function, int(line)) for n, file, function, line in found}

    @functools.cached_property
    def _frames(self) -> dict[int, tuple[int, int]]:
        listed = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        return {int(n): (int(p), int(o or 0)) for n, p, o in re.findall(listed, self._text, re.M)}

    # ------------------------------------------------------------ loops and groups

    @functools.cached_property
    def _runs(self) -> Callable[..., int]:
        """How often a computation runs: the product of its loops' trip counts.

        By default, a branch and a loop whose length is data run once (`unknown`).
        """
        calls: dict[str, list[tuple[str, int | None]]] = {}
        for found in self._instructions:
            trips = found.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
            for kind, callees in re.findall(
                r"(body|calls|to_apply|condition|\w+_computations?)=(%[\w.\-]+|\{.*?\})", found.text
            ):
                by_data = kind.startswith(("branch", "true", "false")) or kind == "body"
                times = (int(trips) if trips else None) if by_data else 1
                for callee in re.findall(r"%([\w.\-]+)", callees):
                    calls.setdefault(callee, []).append((found.computation, times))

        @functools.cache
        def runs(computation: str, unknown: int = 1) -> int:
            callers = calls.get(computation)
            each = ((runs(c, unknown), unknown if n is None else n) for c, n in callers or ())
            return sum(outer * times for outer, times in each) if callers else 1

        return runs

    def _groups(self, found: Instruction) -> Groups:
        """The devices that take part together; () for all of them."""
        listed = found.attribute(r"replica_groups=\{(\{[\d,{}]*\})\}")
        if listed:
            return tuple(_numbers(g) for g in re.findall(r"\{([\d,]+)\}", listed))
        iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[.*?\](?:T\(.*?\))?)", found.text)
        if iota:
            return _rows(_ids(iota[3], self._num_devices).reshape(int(iota[1]), int(iota[2])))
        mesh = re.search(
            r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((\S*)\))? \{(.*?)\}", found.text
        )
        if mesh is None:
            return ()
        axes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])]
        sizes, over = _split_axes(axes, re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[3]))
        ids = _ids(mesh[2] or "", self._num_devices).reshape(sizes)
        kept = [d for d in range(len(sizes)) if d not in over]
        return _rows(ids.transpose(*kept, *over).reshape(-1, math.prod(sizes[d] for d in over)))

    # ------------------------------------------------------------ as accelerators run it

    def _joins(self, group: list[Made], found: Instruction, values: Values) -> bool:
        """Whether XLA for GPUs combines a collective with others: none of which it waits for."""
        first, (_, moved) = group[0][0], group[0][1][0]
        if first.computation != found.computation or moved.kind not in _COMBINED:
            return False
        if (moved.kind, moved.groups) != (values[0][1].kind, values[0][1].groups):
            return False
        total = sum(t.size for _, others in [*group, (found, values)] for _, t in others)
        waits = self._waits_for[found.computation, found.name]
        return total <= _MOST_COMBINED and not any(other.name in waits for other, _ in group)

    @functools.cached_property
    def _waits_for(self) -> dict[tuple[str, str], frozenset[str]]:
        """By computation and name: the collectives that an instruction needs the results of."""
        found: dict[tuple[str, str], frozenset[str]] = {}
        for each in self._instructions:
            before = [found.get((each.computation, name), frozenset()) for name in each.operands]
            own = [n for n in each.operands if self._by_name[n].op.replace("-", "_") in KINDS]
            found[each.computation, each.name] = frozenset(own).union(*before)
        return found

    def _is_widened(self, found: Instruction) -> bool:
        """Whether a value of 16 bits is sent in 32, since CPUs compute with these."""
        if "_promoted" in found.attribute(r"to_apply=%([\w.\-]+)"):
            return True
        maker = self._by_name[found.operands[0]]
        inside = maker.attribute(r"calls=%([\w.\-]+)")
        steps = [i for i in self._instructions if i.computation == inside] if inside else [maker]
        converted = [i for i in steps if i.op == "convert" and i.type.startswith("f32")]
        sources = [self._by_name[i.operands[0]].shapes[0] for i in converted]
        return any(s[0] in ("bf16", "f16") and 2 * _bytes(*s) == maker.size for s in sources)

    def _is_sliced(self, found: Instruction, share: int) -> bool:
        """Whether all that use a value take one slice of it, of `share` bytes."""
        users = self._users.get((found.computation, found.name), [])
        return bool(users) and all(self._slices(found, user, share) for user in users)

    def _slices(self, found: Instruction, user: Instruction, share: int) -> bool:
        if user.op == "dynamic-slice":
            return user.size == share
        if user.op in _SAME_VALUE:
            return self._is_sliced(user, share * user.size // found.size)
        inside = user.attribute(r"calls=%([\w.\-]+)") if user.op == "fusion" else ""
        given = [i for i in self._instructions if i.computation == inside and i.op == "parameter"]
        numbers = [n for n, operand in enumerate(user.operands) if operand == found.name]
        taken = [i for i in given if int(i.attribute(r"parameter\((\d+)\)")) in numbers]
        return bool(taken) and all(self._is_sliced(i, share) for i in taken)

    @functools.cached_property
    def _users(self) -> dict[tuple[str, str], list[Instruction]]:
        found: dict[tuple[str, str], list[Instruction]] = {}
        for user in self._instructions:
            for operand in user.operands:
                found.setdefault((user.computation, operand), []).append(user)
        return found


def collectives_of_hlo(text: str, num_devices: int) -> Iterator[Collective]:
    """The collectives of a compiled program, with the trip counts of their loops."""
    return (collective for collective, _ in HloProgram(text, num_devices).collectives())


def _instructions(text: str) -> Iterator[Instruction]:
    computation = ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            computation = head[1]
        elif found := _INSTRUCTION.match(line):
            operands = re.findall(r"%([\w.\-]+)", found["rest"].partition(")")[0])
            yield Instruction(
                computation, found["name"], found["type"], found["op"], tuple(operands), line
            )


def _combined(values: Values) -> tuple[Collective, Transfer]:
    """The collective of several values: the first one's, with their sum and each as a member."""
    (first, moved), sizes = values[0], [t.size for _, t in values]
    if len(values) == 1:
        return first, moved
    members = tuple(collective for collective, _ in values)
    why = replace(first.why, values=len(values))
    both = replace(first, bytes=sum(c.bytes for c in members), why=why, members=members)
    return both, replace(moved, size=sum(sizes))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in ids)


def _ids(text: str, count: int) -> np.ndarray:
    """Device ids as XLA lists them: "3,1,0,2", "[8]", "[2,4]T(1,0)" transposed; "" in order."""
    shape = re.search(r"\[([\d,]+)\]", text)
    if text and shape is None:
        return np.array(_numbers(text))
    order = re.search(r"T\(([\d,]+)\)", text)
    ids = np.arange(count).reshape(_numbers(shape[1]) if shape else (count,))
    return ids.transpose(_numbers(order[1])) if order else ids


def _split_axes(
    axes: list[tuple[str, int]], used: list[tuple[str, str, str]]
) -> tuple[list[int], list[int]]:
    """The sizes of a mesh's axes, and which of them are used, in their order.

    A part of an axis, as in 'x':(2)4, is an axis of its own: 4 long, behind one of 2.
    """
    sizes: list[int] = []
    at: dict[tuple[str, int], int] = {}  # by name, and how many the parts before it are
    for name, size in axes:
        ends = {int(before) * n for own, before, end in used if own == name and end
                for n in (1, int(end))}  # fmt: skip
        cuts = sorted({1, size, *ends})
        for before, after in zip(cuts, cuts[1:] or [size], strict=False):
            at[name, before] = len(sizes)
            sizes.append(after // before)
    over = []
    for name, start, length in used:
        first = int(start or 1)
        last = first * int(length or dict(axes)[name] // first)
        over += [d for (own, begin), d in at.items() if own == name and first <= begin < last]
    return sizes, over


def _bytes(dtype: str, dims: tuple[int, ...]) -> int:
    return _width(dtype) * math.prod(dims)


def _width(dtype: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return max(bits // 8, 1)
