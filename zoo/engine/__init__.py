"""Runs a chain by a plan, bit for bit."""
