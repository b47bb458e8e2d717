"""Where vLLM 0.11 has what its current engine is made of."""
