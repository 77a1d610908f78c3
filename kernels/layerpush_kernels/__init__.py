"""GPU kernels of layerpush: a gather of KV blocks, and their checksums. They need torch and triton only."""

from layerpush_kernels.checksums import checksum_parts
from layerpush_kernels.gather import FULL_DEVICE_PROGRAMS, gather_blocks
from layerpush_kernels.geometry import Geometry, geometry_of
from layerpush_kernels.layers import LayerTable, layer_table

__all__ = [
    "FULL_DEVICE_PROGRAMS",
    "Geometry",
    "LayerTable",
    "checksum_parts",
    "gather_blocks",
    "geometry_of",
    "layer_table",
]
