"""The version, in one place that packaging reads without importing torch."""

__version__ = "0.1.0"
