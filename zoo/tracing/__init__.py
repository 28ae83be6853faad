"""Kernel graphs: what a forward runs below autograd, as data for the planner.

A graph decides where plans may cut a model and what the steps between the cuts cost. It is never
run in the model's place.
"""
