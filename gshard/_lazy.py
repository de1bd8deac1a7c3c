"""Packages whose public names are imported when they are first used.

`import gshard` alone loads neither JAX nor the partitioner, so that a command that needs neither,
such as a translation on a CPU, starts in a fraction of the time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> list[str]:
    """Let `package` import its public names from their modules when one is first read: all at once.

    `names` has those of each module, separated by spaces; those of the package itself are modules.
    Returned are all of them, in order. For type checkers the package imports each as itself, which
    says that it is public.
    """
    origins = {name: module for module, several in names.items() for name in several.split()}

    class LazyPackage(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in origins:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            for each, module in origins.items():
                if module == package:
                    found: Any = importlib.import_module(f"{package}.{each}")
                else:
                    found = getattr(importlib.import_module(module), each)
                self.__dict__[each] = found
            return self.__dict__[name]

        def __dir__(self) -> list[str]:
            return sorted(self.__dict__["__all__"])

        def __setattr__(self, name: str, value: Any) -> None:
            # Importing the module gshard.jit binds it here, where the function of that name is.
            if not (isinstance(value, ModuleType) and origins.get(name) == f"{package}.{name}"):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = LazyPackage
    return sorted(origins)
