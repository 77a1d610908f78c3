"""Copies of a test's world, for explorers that make one for each event. Frozen objects are shared, not copied."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import numpy as np

World = TypeVar("World")

SHARED = (bool, bytes, Enum, float, frozenset, int, str, tuple, type, type(None))
"""Types of values that do not change. A tuple in a world has no mutable members."""


def clone(world: World) -> World:
    """A copy that shares no mutable object with ``world``."""
    copy: World = _clone(world, {})
    return copy


class _Kinds(dict[type, bool]):
    """Whether objects of a class never change."""

    def __missing__(self, kind: type) -> bool:
        settings = getattr(kind, "__dataclass_params__", None) or getattr(kind, "__struct_config__", None)
        self[kind] = issubclass(kind, SHARED) or (settings is not None and bool(settings.frozen))
        return self[kind]


_shared = _Kinds()


def _clone(value: Any, copies: dict[int, Any]) -> Any:
    """``copies`` by the identity of their originals: an object that two others know is one object in the copy, too."""
    if (known := copies.get(id(value))) is not None:
        return known
    kind = type(value)
    copy: Any
    if _shared[kind]:
        return value
    if kind is list:
        copy = [each if _shared[type(each)] else _clone(each, copies) for each in value]
    elif kind is set:
        copy = set(value)
    elif kind is dict:
        copy = {key: each if _shared[type(each)] else _clone(each, copies) for key, each in value.items()}
    elif kind is np.ndarray:
        copy = value.copy()
    else:
        copy = object.__new__(kind)
        if hasattr(value, "__dict__"):
            members = vars(value).items()
            vars(copy).update({name: each if _shared[type(each)] else _clone(each, copies) for name, each in members})
        else:
            for name in kind.__slots__:
                each = getattr(value, name)
                object.__setattr__(copy, name, each if _shared[type(each)] else _clone(each, copies))
    copies[id(value)] = copy
    return copy
