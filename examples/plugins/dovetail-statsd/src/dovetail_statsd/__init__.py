"""Dovetail's measurements as StatsD lines."""
