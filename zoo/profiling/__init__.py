"""What a chain costs and what a training step took, in bytes and operations."""
