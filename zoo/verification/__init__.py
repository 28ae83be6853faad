"""What `zoo.verify` compares, where it looks for the cause, and how it says so."""
