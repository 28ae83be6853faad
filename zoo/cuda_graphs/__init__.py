"""Whole training steps as CUDA graphs: captured once, replayed without Python."""
