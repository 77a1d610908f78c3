"""The metrics of layerpush, and their way from a worker's threads to the engine's ``/metrics``."""
