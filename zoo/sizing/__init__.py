"""The largest batch, sequence or volume whose training step keeps to a memory budget."""
