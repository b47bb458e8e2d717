"""GPT-2 and models of its shape for Dovetail."""
