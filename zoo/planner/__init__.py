"""From costs to plans: numbers in, plans out, no torch."""
