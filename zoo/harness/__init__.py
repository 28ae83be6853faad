"""Runs the comparison: a config becomes cells, each cell runs in a process of its own."""
