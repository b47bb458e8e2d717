"""How new weights reach the workers of a running engine."""
