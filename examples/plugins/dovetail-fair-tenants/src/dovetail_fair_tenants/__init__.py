"""Schedulers for Dovetail that share an engine among tenants."""
