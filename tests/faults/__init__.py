"""Faults on real engines: every row of the matrix in docs/design/failures.md."""
