"""Where vLLM has `LLM`."""
