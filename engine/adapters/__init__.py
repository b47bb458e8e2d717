"""Low-rank adapters of an engine: which are known, which are being read, and which have a slot."""
