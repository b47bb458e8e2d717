"""`dovetail chat`: a conversation in the terminal."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.console import Console

from dovetail.commands import LayeredConfig, create_console, print_error, takes_config
from dovetail.commands.adapters import LORA_HELP, with_adapter
from dovetail.commands.sampling import refuse_unseen, sampling_params
from dovetail.commands.streaming import print_rates, print_speculation, stream
from dovetail.contracts.command import Command
from dovetail.contracts.errors import RequestError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.commands.chat.conversation import LineInput

if TYPE_CHECKING:
    from dovetail import LLM

app = typer.Typer(help="Chat with a model in the terminal.", rich_markup_mode=None)


class ChatCommand(Command):
    """Chat with a model in the terminal."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


_HELP = """\
/clear  begin a new conversation; the system message stays
/exit   end (Ctrl-D too)
/help   this list
Ctrl-C  stop an answer; what came of it stays in the conversation"""
_EXAMPLE = "Example: dovetail chat --system 'Answer in one sentence.' --temperature 0"


class Conversation:
    """The messages so far, and how they are answered."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        adapter: LoRARequest | None,
        system: str | None,
        console: Console,
        stats: bool,
    ):
        self._llm = llm
        self._params = params
        self._adapter = adapter
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._console = console
        self._stats = stats

    def clear(self) -> None:
        """Forgets all but the system message."""
        self._messages = list(self._opening)

    def answer(self, text: str) -> None:
        """Prints the model's answer. One that Ctrl-C stopped is remembered as far as it came; a turn that was refused,
        or stopped before its first token, is not."""
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._llm.render_chat(self._messages)
            output = stream(self._llm.engine, prompt, self._params, lora_request=self._adapter)
        except RequestError as error:
            print_error(error)
            self._messages.pop()
            return
        if output is None:
            self._console.print("[dim]stopped before the answer began: this turn is forgotten[/dim]")
            self._messages.pop()
            return
        answer = output.outputs[0]
        print_rates(output)
        if answer.finish_reason == "length":
            self._console.print(f"[dim]cut after {len(answer.token_ids)} tokens: --max-tokens allows more[/dim]")
        if self._stats:
            print_speculation([output])
        self._messages.append({"role": "assistant", "content": answer.text})


@app.command("chat", epilog=_EXAMPLE)
@takes_config
def chat(
    layered: LayeredConfig,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option("--sampling", "-s", metavar="KEY=VALUE", help="A field of SamplingParams, as in -s top_p=0.9."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Maximum tokens per answer (512).")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    lora: Annotated[list[str] | None, typer.Option("--lora", metavar="NAME=PATH", help=LORA_HELP)] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="After each answer, print how many draft tokens were accepted.")
    ] = False,
) -> None:
    """Chat with a model. Ctrl-D or /exit ends the conversation, Ctrl-C stops an answer, /help lists commands."""
    from dovetail import LLM

    console = create_console(stderr=True)
    flagged = partial(sampling_params, max_tokens=max_tokens, temperature=temperature)
    changed = partial(flagged, settings=sampling or [], default_max_tokens=512)
    changed(SamplingParams())  # what no model accepts is refused before one is loaded
    layered, adapter = with_adapter(layered, lora or [])
    with LLM(config=layered) as llm:
        params = changed(llm.get_default_sampling_params())
        refuse_unseen(params)
        lines = LineInput(console)
        if lines.is_terminal:
            model = llm.engine.config.model
            greeting = f"{model.files.reference}, context of {model.max_model_len:,} tokens. /help lists commands."
            console.print(greeting, soft_wrap=True)
        with lines.history():
            _talk(lines, Conversation(llm, params, adapter, system, console, stats), console)


def _talk(lines: LineInput, conversation: Conversation, console: Console) -> None:
    """Answers line after line until the end of input."""
    while True:
        try:
            text = lines.read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D or /exit ends the conversation[/dim]")
            continue
        match text:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/clear":
                conversation.clear()
                console.print("[dim]a new conversation[/dim]")
            case "/help":
                console.print(_HELP)
            case _:
                conversation.answer(text)
