"""Telemetry sink `experiments`: what became of each request that took part in an experiment on live traffic."""
