"""What `zoo.verify` compares, and how it says what differs."""
