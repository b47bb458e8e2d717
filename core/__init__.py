"""Dovetail: an LLM inference and serving framework made of plugins."""
