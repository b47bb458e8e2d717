"""Route `completions`: OpenAI's /v1/completions with vLLM's extra fields."""
