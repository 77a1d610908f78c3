"""Generates parts of README.md and docs/ from code and from measured results."""
