"""Route `messages`: Anthropic's /v1/messages."""
