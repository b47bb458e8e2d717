"""Grammars that libraries compile, and what such plugins have in common."""
