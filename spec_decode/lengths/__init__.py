"""Draft lengths: how many drafts are worth asking for and verifying."""

DEFAULT = "adaptive"
"""What `speculative.drafters.NAME.length` is where the config says nothing."""
