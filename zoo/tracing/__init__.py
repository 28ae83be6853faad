"""Computation graphs of forwards, traced below autograd: where plans cut a model, and at what cost.

No graph runs in the model's place.
"""
