"""Bytes of memory that a value holds, about. Tables bound themselves with it. Pure."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

import msgspec

BLOCK_BYTES = 32
"""Bytes of one number in a list of block ids, beside its place in the list."""


def size_of(value: object) -> int:
    """Bytes of a value and of the values in it. A list of numbers is not walked: all its items count the same."""
    held = getattr(value, "held_bytes", None)
    if isinstance(held, int):
        return held
    total = sys.getsizeof(value)
    if isinstance(value, msgspec.Struct):
        return total + sum(size_of(getattr(value, name)) for name in value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return total + sum(size_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return total + sum(size_of(key) + size_of(item) for key, item in value.items())
    if isinstance(value, tuple | list):
        if value and type(value[0]) is int:
            return total + BLOCK_BYTES * len(value)
        return total + sum(map(size_of, value))
    return total
