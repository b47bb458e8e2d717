"""vLLM's names of prompts."""

from __future__ import annotations

from dovetail.contracts.prompts import Prompt, TextPrompt, TokensPrompt
from dovetail.vllm.missing import answering

PromptType = Prompt
SingletonPrompt = Prompt

__all__ = ["PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]

__getattr__ = answering(__name__)
