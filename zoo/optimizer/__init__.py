"""An optimizer that updates each parameter in the backward, as soon as its gradient is complete."""
