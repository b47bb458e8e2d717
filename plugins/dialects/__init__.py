"""Dialects: how families of chat models write reasoning and tool calls."""
