"""Where vLLM has its config objects. Settings are keywords, a mapping or a file here; the names answer with which."""

from __future__ import annotations

from typing import NoReturn

from dovetail.vllm.missing import CONFIGS, answer_import

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    answer_import(__name__, name, CONFIGS)
