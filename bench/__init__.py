"""Measurements of layerpush. ``make bench`` runs ``bench.serve``."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
"""The committed results, which the documentation shows. No command writes here unless it is told to."""
OUTPUT = Path(__file__).parents[1] / "build" / "bench"
"""Where commands write by default; git ignores it."""
