"""Computes plans from the costs of steps: numbers in, plans out, no torch."""
