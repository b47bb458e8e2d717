"""`bench serve`: requests over HTTP to any server of OpenAI's API, or to several by turns."""
