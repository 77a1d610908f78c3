"""GPU kernels of layerpush: gather and scatter of KV blocks. They need torch and triton only, not vLLM."""

from layerpush_kernels.geometry import Geometry, geometry_of
from layerpush_kernels.layers import LayerTable, layer_table
from layerpush_kernels.packing import FULL_DEVICE_PROGRAMS, gather_blocks, scatter_blocks

__all__ = [
    "FULL_DEVICE_PROGRAMS",
    "Geometry",
    "LayerTable",
    "gather_blocks",
    "geometry_of",
    "layer_table",
    "scatter_blocks",
]
