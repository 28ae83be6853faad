"""Traces forwards into computation graphs below autograd, and partitions these into steps to plan.

A model's own code runs in training, never the graph.
"""
