"""Route `pooling`: embeddings under OpenAI's schema; scores, reranking and other pooling under vLLM's."""
