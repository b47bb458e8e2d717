import msgspec
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.dialect import Tool, ToolChoice
from typing import Annotated, Any

MAX_TOOLS = 1024
Tools = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]

@dataclass(frozen=True, kw_only=True)
class ToolSet:
    shown: tuple[dict[str, Any], ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)

def tool_set(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
    parallel: bool | None,
) -> ToolSet: ...
def tool_choice(choice: Any, parallel: bool) -> ToolChoice: ...
