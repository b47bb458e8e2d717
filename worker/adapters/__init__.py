"""Low-rank adapters on one rank: PEFT's files, what is kept in host memory, and what is in slots."""
