"""A Python function that compiled programs call on a CPU, in microseconds.

XLA's foreign function interface calls a C function, which `ctypes` makes of a Python one. JAX's own
callbacks convert every operand, take ten times as long, and keep a program out of the cache of
compiled programs. The structures are those of `xla/ffi/api/c_api.h`, as far as they are read here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import jax

_VERSION = (0, 3)  # of the interface; later ones support it, too
_METADATA = 1  # the extension by which XLA asks for the version


class _Extension(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_MetadataExtension)),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Arguments),
    )


_registered: list[Any] = []  # functions that C has pointers to


def register(target: str, called: Callable[[Sequence[int]], None], words: int) -> None:
    """Let a custom call with this name call a function, on CPUs.

    It receives the first `words` operands, which have to be scalars of type uint32.
    """

    def handler(frame: Any) -> None:
        extension = frame.contents.extension_start
        if extension and extension.contents.base.type == _METADATA:
            version = extension.contents.metadata.contents.version
            version.major, version.minor = _VERSION
            return
        buffers = frame.contents.arguments.buffers
        called([ctypes.c_uint32.from_address(buffers[i].contents.data).value for i in range(words)])

    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(handler)
    _registered.append(function)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
