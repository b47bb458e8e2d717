"""Structured outputs over HTTP: whether what ends is valid, and what forced tokens save."""
