"""Bundled routers."""
