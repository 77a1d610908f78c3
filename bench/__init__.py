"""Measurements of layerpush on real engines. Run with ``make bench`` or ``python -m bench``."""
