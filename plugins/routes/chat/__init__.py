"""Route `chat`: OpenAI's /v1/chat/completions with vLLM's extra fields."""
