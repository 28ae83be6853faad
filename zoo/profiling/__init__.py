"""Profiling: the bytes, operations and seconds that a training step will take, and took."""
