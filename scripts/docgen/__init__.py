"""The parts of README.md and docs/ that are made from code and from measured results, so that they cannot go stale."""
