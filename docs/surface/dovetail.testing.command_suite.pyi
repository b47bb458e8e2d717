from collections.abc import Sequence
from dovetail.contracts.command import Command
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar

USAGE = 2

class CommandSuite(PluginSuite):
    kind: ClassVar[str] = 'command'
    plugin: ClassVar[type[Command]]
    works: ClassVar[Sequence[Sequence[str]]]
    refused: ClassVar[Sequence[Sequence[str]]] = ()
    def run(self, arguments: Sequence[str], columns: int = 80) -> Any: ...
