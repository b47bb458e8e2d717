"""Pools hidden states of requests that do not generate."""
