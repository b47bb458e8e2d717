"""`dovetail chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.errors import create_console, print_error
from dovetail.cli.options import takes_config
from dovetail.cli.sampling import refuse_unseen, sampling_params
from dovetail.cli.streaming import print_rates, print_speculation, stream
from dovetail.config.layers import LayeredConfig
from dovetail.contracts.errors import RequestError

app = typer.Typer(help="Chat with a model in the terminal.", rich_markup_mode=None)


@app.command("chat")
@takes_config
def chat(
    layered: LayeredConfig,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option("--sampling", "-s", metavar="KEY=VALUE", help="A field of SamplingParams, as in -s top_p=0.9."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens per answer (512).")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say after each answer what became of guesses.")] = False,
) -> None:
    """Chat with a model. An empty line or end of input ends the conversation; Ctrl-C ends an answer."""
    from dovetail.llm import LLM

    console = create_console(stderr=True)
    with LLM(config=layered) as llm:
        params = sampling_params(
            llm.get_default_sampling_params(),
            sampling or [],
            default_max_tokens=512,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        refuse_unseen(params)
        messages = [] if system is None else [{"role": "system", "content": system}]
        while True:
            try:
                console.print("[bold]> [/bold]", end="")
                text = input()
            except EOFError:
                return
            if not text.strip():
                return
            messages.append({"role": "user", "content": text})
            try:
                output = stream(llm.engine, llm.render_chat(messages), params)
            except KeyboardInterrupt:
                messages.pop()
                continue
            except RequestError as error:
                print_error(error)
                messages.pop()
                continue
            print_rates(output)
            if stats:
                print_speculation([output])
            messages.append({"role": "assistant", "content": output.outputs[0].text})
