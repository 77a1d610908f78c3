"""``scripts/gpu-bench``: the measurements of one GPU, in parts of some minutes each."""
