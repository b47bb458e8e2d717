"""What forced tokens save: the same requests with the grammar drafter and without, by turns, on a real server.

    python benchmarks/structured/forced.py [--pairs 30] [--grammar llguidance] [--length adaptive] [--log server.log]

Two tasks, greedy, one request at a time: JSON by a schema of five fields, and a call of a tool. A pair is one prompt
asked twice, once with `speculation: forced` and once with `off`; who is first alternates. Equal texts are counted.
Steps are those of the engine (`dovetail:step_duration_seconds_count` before and after), seconds those that the client
waits. Ratios are off / forced, above 1 where forced tokens help: geometric means over pairs with 95% intervals
(bootstrap-t over prompts, as `dovetail ab` has them).
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.structured.schemas import Schema, array, number, record, text
from benchmarks.structured.serving import serving
from dovetail.spec_decode.experiments.bootstrap import Estimate, Resampler

_PEOPLE = (
    "Ada Lovelace, a mathematician of London",
    "Marie Curie, a physicist of Paris",
    "Alan Turing, a logician of Manchester",
    "Grace Hopper, an admiral of New York",
    "Leonhard Euler, a mathematician of Basel",
    "Emmy Noether, an algebraist of Erlangen",
    "Isaac Newton, a physicist of Cambridge",
    "Rosalind Franklin, a chemist of London",
    "Galileo Galilei, an astronomer of Pisa",
    "Hypatia, a teacher of Alexandria",
)
_PERSON = record(
    full_name=text(maxLength=24),
    age_in_years=number("integer", minimum=0, maximum=120),
    city_of_residence=text(maxLength=16),
    favourite_subjects=array(text(maxLength=12), 1, 2),
    is_still_active={"type": "boolean"},
)
_WEATHER = record(location=text(maxLength=20), temperature_unit={"enum": ["celsius", "fahrenheit"]})
_CITIES = ("Paris", "London", "Basel", "Pisa", "Cairo", "Lima", "Oslo", "Delhi", "Tokyo", "Accra")
# The default model's own template shows no tools.
_TEMPLATE = """\
{% if tools %}<|im_start|>system
Call one of these tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Requests of one kind."""

    name: str
    prompts: Sequence[str]
    fields: dict[str, Any]
    """Of a request."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One request."""

    seconds: float
    num_steps: int
    num_tokens: int
    said: str


def tasks(num_pairs: int) -> list[Task]:
    """Both, with that many prompts."""
    asks = ("Describe {}.", "Make a record of {}, please.", "Who was {}?", "Fill in the form for {}.")
    people = [ask.format(person) for ask in asks for person in _PEOPLE][:num_pairs]
    questions = ("What is the weather in {}?", "Is it cold in {} today?", "Weather of {}", "How warm is {} now?")
    weather = [question.format(city) for question in questions for city in _CITIES][:num_pairs]
    schema: Schema = {"name": "person", "schema": _PERSON, "strict": True}
    function = {"name": "get_current_weather", "parameters": _WEATHER, "strict": True}
    return [
        Task(
            name="JSON of five fields",
            prompts=people,
            fields={"response_format": {"type": "json_schema", "json_schema": schema}},
        ),
        Task(
            name="call of a tool",
            prompts=weather,
            fields={
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "extra_body": {"chat_template": _TEMPLATE},
            },
        ),
    ]


class Client:
    """Asks one server, and reads its counters."""

    def __init__(self, url: str):
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self._http = httpx.Client(base_url=url)

    def run(self, task: Task, prompt: str, drafter: str) -> Run:
        """One request."""
        fields = {**task.fields, "extra_body": {**task.fields.get("extra_body", {}), "speculation": drafter}}
        before, started = self._num_steps(), time.perf_counter()
        answer = self._openai.chat.completions.create(
            model="served",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=160,
            **fields,
        )
        seconds = time.perf_counter() - started
        message, usage = answer.choices[0].message, answer.usage
        assert usage is not None
        calls = [f"{call.function.name}{call.function.arguments}" for call in message.tool_calls or ()]
        return Run(
            seconds=seconds,
            num_steps=self._num_steps() - before,
            num_tokens=usage.completion_tokens,
            said="".join([message.content or "", *calls]),
        )

    def _num_steps(self) -> int:
        found = re.search(r"^dovetail:step_duration_seconds_count\S* (\S+)", self._http.get("/metrics").text, re.M)
        return int(float(found[1])) if found is not None else 0


def measure(client: Client, task: Task) -> str:
    """One row of the table."""
    for drafter in ("off", "forced"):  # the grammar is compiled, and the costs of drafts are known
        client.run(task, task.prompts[0], drafter)
    pairs: list[tuple[Run, Run]] = []
    for index, prompt in enumerate(task.prompts):
        order = ("off", "forced") if index % 2 else ("forced", "off")
        runs = {drafter: client.run(task, prompt, drafter) for drafter in order}
        pairs.append((runs["off"], runs["forced"]))
    steps = ratio([(off.num_steps, forced.num_steps) for off, forced in pairs])
    seconds = ratio([(off.seconds, forced.seconds) for off, forced in pairs])
    tokens = statistics.mean(off.num_tokens for off, _ in pairs)
    counts = [statistics.mean(runs[arm].num_steps for runs in pairs) for arm in (0, 1)]
    times = [1e3 * statistics.median(runs[arm].seconds for runs in pairs) for arm in (0, 1)]
    same = sum(off.said == forced.said for off, forced in pairs)
    return (
        f"| {task.name} | {len(pairs)} | {same} | {tokens:.1f} | {counts[0]:.1f} / {counts[1]:.1f} | {shown(steps)} |"
        f" {times[0]:.0f} / {times[1]:.0f} | {shown(seconds)} |"
    )


def ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Mean of the logarithms of off / forced."""
    return Resampler(0).mean([math.log(off / forced) for off, forced in pairs])


def shown(estimate: Estimate) -> str:
    """As a ratio, with its interval."""
    value = f"{math.exp(estimate.value):.2f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} ({math.exp(estimate.low):.2f} to {math.exp(estimate.high):.2f})"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="of each task, 40 at most")
    parser.add_argument("--grammar", default="llguidance")
    parser.add_argument("--length", default="adaptive", help="plugin that chooses the length of drafts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log", type=Path, default=Path("server.log"))
    given = parser.parse_args()
    with serving(
        grammar=given.grammar, dialect="hermes", length=given.length, threads=given.threads, log=given.log
    ) as url:
        client = Client(url)
        print(f"{given.grammar} {version(given.grammar)}, lengths {given.length}, threads {given.threads}")
        print("| task | pairs | same text | tokens | steps off / forced | ratio | ms off / forced, p50 | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for task in tasks(given.pairs):
            print(measure(client, task), flush=True)


if __name__ == "__main__":
    main()
