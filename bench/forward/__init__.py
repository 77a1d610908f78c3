"""Pushes during a synthetic forward, between two processes with real NIXL. Run with ``python -m bench.forward``."""
