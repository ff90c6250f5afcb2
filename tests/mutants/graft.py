"""Puts the code of a changed source file into the module that is loaded already: everyone who holds one of its
functions or classes sees the change, and nothing has to be imported again. Knows nothing of tests and mutations.

Functions get new code and new defaults, plain constants new values (also where other modules have imported them).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

PLAIN = (bool, int, float, str, bytes, tuple, frozenset)


def graft(module: ModuleType, text: str) -> None:
    """Whatever the new source raises while it is loaded is raised."""
    scratch = ModuleType(module.__name__)  # dataclasses look their module up by this name, and find the old one
    scratch.__file__ = module.__file__
    code = compile(text, str(module.__file__), "exec")
    exec(code, scratch.__dict__)
    new_functions = dict(_functions(scratch.__dict__, module.__name__))
    for name, old in _functions(module.__dict__, module.__name__):
        new = new_functions[name]
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
    for name, value in list(module.__dict__.items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            _copy_constants(value, getattr(scratch, name))
        elif isinstance(value, PLAIN) and not name.startswith("__") and value != getattr(scratch, name):
            _rebind(name, value, getattr(scratch, name))


def _functions(space: dict[str, object], module: str) -> Iterator[tuple[str, FunctionType]]:
    """(qualified name, function) of everything defined in this namespace, methods of its classes too."""
    for name, value in list(space.items()):
        if isinstance(value, type) and value.__module__ == module:
            for inner, function in _functions(dict(value.__dict__), module):
                yield f"{name}.{inner}", function
        for suffix, function in _parts(value):
            if function.__module__ == module:
                yield name + suffix, function


def _parts(value: object) -> Iterator[tuple[str, FunctionType]]:
    if isinstance(value, property):
        for suffix, part in ((".get", value.fget), (".set", value.fset)):
            if isinstance(part, FunctionType):
                yield suffix, part
    elif isinstance(value, classmethod | staticmethod):
        yield from _parts(value.__func__)
    elif isinstance(value, FunctionType):
        yield "", value


def _copy_constants(old: type, new: type) -> None:
    for name, value in list(old.__dict__.items()):
        if isinstance(value, PLAIN) and not name.startswith("__") and value != new.__dict__[name]:
            setattr(old, name, new.__dict__[name])


def _rebind(name: str, old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
