"""Runs a comparison: a config is expanded into cells, and each runs in a process of its own."""
