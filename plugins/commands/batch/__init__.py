"""`dovetail batch`: files of requests in OpenAI's batch format, answered by a server."""
