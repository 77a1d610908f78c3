"""The demonstration: real prefill and decode servers on one machine, with the figures of each mode side by side."""
