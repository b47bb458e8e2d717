"""EAGLE-1 and EAGLE-3 heads: a layer that guesses from the target's own states."""
