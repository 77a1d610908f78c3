"""A table of the caches of several layers, which one launch copies together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerpush_kernels.geometry import Geometry, geometry_of


@dataclass(frozen=True)
class LayerTable:
    """Caches of one geometry, with their addresses in device memory: made once by :func:`layer_table`, then sliced.

    ``addresses`` are those of the caches. ``pointers`` holds them as int64 ``[layers]`` on the caches' device; it is
    None for a single cache without a table. ``alignment`` (bytes) is :meth:`Geometry.alignment` with all the addresses.
    ``table[2:5]`` has three layers and takes no new device memory; an empty slice raises ``ValueError``.
    """

    caches: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    geometry: Geometry
    alignment: int
    pointers: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.caches)

    def __getitem__(self, part: slice) -> LayerTable:
        if not self.caches[part]:
            raise ValueError(f"{part} has none of the {len(self)} layers")
        pointers = None if self.pointers is None else self.pointers[part]
        return LayerTable(self.caches[part], self.addresses[part], self.geometry, self.alignment, pointers)

    @property
    def device(self) -> torch.device:
        return self.caches[0].device


def layer_table(caches: Sequence[torch.Tensor]) -> LayerTable:
    """Put the addresses of caches ``[num_blocks, ...]`` of one device, shape and strides into a table on that device.

    It allocates 8 bytes per layer and waits for their copy: call it at start-up, from any thread. The table keeps the
    caches alive. Raises ``ValueError`` if there are no caches or if they differ in device or geometry, and as
    :func:`geometry_of` does.
    """
    if not caches:
        raise ValueError("a table needs one cache or more")
    geometry, device = geometry_of(caches[0]), caches[0].device
    for index, cache in enumerate(caches):
        if cache.device != device or geometry_of(cache) != geometry:
            raise ValueError(f"cache {index} differs from cache 0 in device, shape or strides")
    addresses = tuple(cache.data_ptr() for cache in caches)
    pointers = torch.tensor(addresses, dtype=torch.int64).to(device)
    return LayerTable(tuple(caches), addresses, geometry, geometry.alignment(*addresses), pointers)


def single_layer(cache: torch.Tensor) -> LayerTable:
    """A table of one cache that takes no device memory. Raises as :func:`geometry_of` does."""
    geometry = geometry_of(cache)
    address = cache.data_ptr()
    return LayerTable((cache,), (address,), geometry, geometry.alignment(address), None)
