"""Runs a model by a plan, bit for bit."""
