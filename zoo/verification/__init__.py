"""What `zoo.verify` compares, and how a difference is worded."""
