"""Comparison of training states bit for bit, and the report of `zoo.verify`."""
