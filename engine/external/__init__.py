"""Blocks of the KV cache that a connector keeps besides the device."""
