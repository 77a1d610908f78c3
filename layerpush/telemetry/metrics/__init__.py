"""What layerpush counts, and how it gets from a worker's threads to the engine's ``/metrics``."""
