"""Route `responses`: OpenAI's /v1/responses."""
