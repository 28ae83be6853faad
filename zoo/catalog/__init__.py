"""Models by name: zoo's own, and those of other libraries."""
