"""Processor time of P's writer thread in a push: its own in Python, and that of NIXL's calls."""
