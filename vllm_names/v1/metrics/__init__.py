"""vLLM's metrics."""
