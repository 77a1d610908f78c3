"""A simulated fleet: many prefill and decode engines, whose pushes, loads and messages are the product's own."""
