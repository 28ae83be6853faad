"""From a `checkpoint=` option or a budget to a plan."""
