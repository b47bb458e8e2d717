"""vLLM's names of prompts."""

from __future__ import annotations

from dovetail.engine.input_processor import Prompt, TextPrompt, TokensPrompt

PromptType = Prompt
SingletonPrompt = Prompt

__all__ = ["PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]
