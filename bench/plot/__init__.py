"""Pictures of results, from the JSON that the benches write."""
