from __future__ import annotations

from typing import Any, ClassVar

from dovetail.plugins.dialects.deepseek_r1 import DeepSeekR1Dialect
from dovetail.plugins.dialects.hermes import HermesDialect
from dovetail.plugins.dialects.llama3_json import Llama3Dialect
from dovetail.plugins.dialects.mistral import MistralDialect
from dovetail.plugins.dialects.plain import PlainDialect
from dovetail.plugins.dialects.qwen3_coder import Qwen3CoderDialect
from dovetail.testing.dialect_suite import DialectSuite


class TestHermes(DialectSuite):
    plugin = HermesDialect


class TestLlama3(DialectSuite):
    plugin = Llama3Dialect


class TestMistralNames(DialectSuite):
    plugin = MistralDialect
    options: ClassVar[dict[str, Any]] = {"form": "name"}


class TestMistralList(DialectSuite):
    plugin = MistralDialect
    options: ClassVar[dict[str, Any]] = {"form": "list"}


class TestQwen3Coder(DialectSuite):
    plugin = Qwen3CoderDialect


class TestDeepSeekR1(DialectSuite):
    plugin = DeepSeekR1Dialect


class TestPlain(DialectSuite):
    plugin = PlainDialect
