"""GPU kernels of layerpush: gather and scatter of KV blocks, and their checksums. They need torch and triton only."""

from layerpush_kernels.checksums import checksum_parts
from layerpush_kernels.geometry import Geometry, geometry_of
from layerpush_kernels.layers import LayerTable, layer_table
from layerpush_kernels.packing import FULL_DEVICE_PROGRAMS, gather_blocks, scatter_blocks

__all__ = [
    "FULL_DEVICE_PROGRAMS",
    "Geometry",
    "LayerTable",
    "checksum_parts",
    "gather_blocks",
    "geometry_of",
    "layer_table",
    "scatter_blocks",
]
