"""Profiling: the bytes, operations and seconds that a chain will take and a training step took."""
