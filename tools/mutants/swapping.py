"""A mutation put into functions that are there already: their code is replaced in place.

So a process that has imported the package and collected all tests can be forked for each mutant,
and nothing is imported again. What is executed while a module is imported (tables, classes,
registrations) cannot be changed like that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from tools.mutants.mutations import Mutation

Functions = dict[tuple[str, str], list[FunctionType]]  # by file and qualified name


def functions_of(root: Path) -> Functions:
    """All functions of the package that exist now."""
    found: Functions = {}
    for each in gc.get_objects():
        # By its type, since `isinstance` asks a weak proxy's object, which may be gone.
        if type(each) is FunctionType and each.__code__.co_filename.startswith(str(root)):
            found.setdefault((each.__code__.co_filename, each.__code__.co_qualname), []).append(
                each
            )
    return found


def swaps(
    mutation: Mutation, root: Path, functions: Functions
) -> list[tuple[FunctionType, CodeType]] | None:
    """The functions that the mutation changes, with their new code; None if there is more to it."""
    path = root / mutation.file
    source = path.read_text()
    mutated = mutation.applied(source)
    assert mutated is not None
    before, after = (
        compile(text, str(path), "exec", dont_inherit=True) for text in (source, mutated)
    )
    found: list[tuple[FunctionType, CodeType]] = []
    for old, new in _changed(before, after):
        if old is None or new is None or old.co_freevars != new.co_freevars:
            return None
        live = functions.get((str(path), old.co_qualname), [])
        if not live or any(f.__code__.co_freevars != new.co_freevars for f in live):
            return None
        found += [(function, new) for function in live]
        for inner, other in _nested(old, new):  # functions that it has returned already
            made = functions.get((str(path), inner.co_qualname), [])
            if any(f.__code__.co_freevars != other.co_freevars for f in made):
                return None
            found += [(function, other) for function in made]
    return found


def _nested(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The functions inside of a function that differ, however deep."""
    for before, after in zip(_inside(old), _inside(new), strict=False):
        if _whole(before) != _whole(after):
            yield before, after
            yield from _nested(before, after)


def _changed(
    before: CodeType, after: CodeType
) -> Iterator[tuple[CodeType | None, CodeType | None]]:
    """The outermost functions that differ; None for anything else that does."""
    if _own(before) != _own(after):
        yield None, None
        return
    for old, new in zip(_inside(before), _inside(after), strict=True):
        if old.co_name != new.co_name:
            yield None, None
        elif _whole(old) == _whole(new):
            continue
        elif _is_class(old):
            yield from _changed(old, new)
        else:
            yield old, new


def _inside(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _own(code: CodeType) -> tuple[object, ...]:
    """What a code is, without line numbers and without the functions in it."""
    consts = tuple(
        ("code", const.co_name)
        if isinstance(const, CodeType)
        else (type(const).__name__, repr(const))
        for const in code.co_consts
        if not (_is_class(code) and const == code.co_firstlineno)  # Python 3.13 keeps it there
    )
    return code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars


def _whole(code: CodeType) -> tuple[object, ...]:
    return (*_own(code), *(_whole(inner) for inner in _inside(code)))


def _is_class(code: CodeType) -> bool:
    return not code.co_flags & 0x2 and code.co_name != "<module>"  # CO_NEWLOCALS: a function
