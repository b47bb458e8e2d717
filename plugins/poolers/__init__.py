"""Bundled poolers."""
