"""Chooses a plan by a `checkpoint=` option or a memory budget."""
