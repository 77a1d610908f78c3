"""What one GPU can show, part by part, each within minutes: ``scripts/gpu-bench``."""
