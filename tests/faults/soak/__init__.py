"""Real engines under load and random faults, checked to the byte: `make soak`."""
