"""Every row of docs/from-vllm.md, on the command line of `dovetail serve` itself: the flag is taken, or is refused with
the reason and with what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.commands.main import LazyGroup, Switches, create_group
from dovetail.config.foreign_names import ForeignName
from dovetail.contracts.errors import ConfigError
from dovetail.registry.registry import Registry
from dovetail.vllm.settings import VLLM_NAMES
from dovetail.vllm.settings_doc import BEGIN, END

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md").read_text()
ROWS = re.findall(r"^\| `(--[a-z0-9-]+)` \| (.*?) \| (\w+)", PAGE.partition(BEGIN)[2].partition(END)[0], re.MULTILINE)

_VALUES = {"str": "x", "strs": "x", "int": "1", "float": "0.5", "json": "{}"}
_OWN_VALUES = {
    "--logprobs-mode": "processed_logprobs",
    "--tokenizer-mode": "slow",
    "--dtype": "half",
    "--lora-dtype": "bfloat16",
    "--kv-cache-dtype": "fp8",
    "--rope-scaling": '{"factor": 2}',
    "--cuda-graph-sizes": "[1]",
    "--speculative-config": '{"method": "ngram"}',
    "--allowed-origins": '["*"]',
    "--allowed-methods": '["GET"]',
    "--allowed-headers": '["*"]',
    "--uvicorn-log-level": "debug",
    "--root-path": "/x",
    "--num-gpu-blocks-override": "2",
    "--eplb-config": '{"window_size": 5}',
    "--media-io-kwargs": '{"x": 1}',
    "--structured-outputs-config": '{"backend": "xgrammar"}',
    "--logits-processors": '["a.B"]',
    "--model": "org/name",
    "--lora-modules": "name=path",
}
"""Where a value of the type alone is none that the flag takes, or asks for what happens anyway."""
_SPEAKS_OF_A_DRAFTER = (
    "num-speculative",
    "ngram-",
    "acceptance",
    "speculative-disable-by",
    "-during-spec",
    "quantization",
)


def value_of(name: ForeignName) -> list[str]:
    if name.type == "switch":
        return [name.negative_flag or ""] if True in name.no_effect and False not in name.no_effect else [name.flag]
    value = _OWN_VALUES.get(name.flag, _VALUES[name.type])
    return [name.flag, "7" if name.type in ("int", "float") and float(value) in name.no_effect else value]


@pytest.fixture(scope="module")
def command_line() -> LazyGroup:
    return create_group(Registry.scan(), Switches())


@pytest.fixture
def serve(command_line: LazyGroup, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs `dovetail serve` where it cannot listen; what it says."""
    handlers, level = logging.root.handlers[:], logging.root.level

    def run(*arguments: str) -> str:
        given = ["serve", *arguments, "-o", f"server.uds={tmp_path / 'absent' / 'socket'}"]
        with pytest.raises(ConfigError) as raised:
            command_line.main(given, prog_name="dovetail", standalone_mode=False)
        return str(raised.value)

    yield run
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


LISTENS = "the server cannot listen on unix:"


def test_every_name_has_a_row() -> None:
    assert [flag for flag, _, _ in ROWS] == [name.flag for name in VLLM_NAMES.values()]


@pytest.mark.parametrize(("flag", "key", "status"), [row for row in ROWS if row[2] == "works"])
def test_a_row_that_works_is_taken(serve: Callable[..., str], flag: str, key: str, status: str) -> None:
    name = VLLM_NAMES[flag[2:].replace("-", "_")]
    model = [] if flag in ("--model", "--uds") else ["./model"]
    needs = ["--speculative-model", "[ngram]"] if any(word in flag for word in _SPEAKS_OF_A_DRAFTER) else []
    others = ["--ssl-certfile", __file__] if flag.startswith("--ssl-") and flag != "--ssl-certfile" else []
    if flag == "--uds":
        assert "server.uds is given twice" in serve(*value_of(name))
    else:
        refusal = "server.tls" if flag.startswith("--ssl-") else LISTENS  # certificates are read before it listens
        assert serve(*model, *needs, *others, *value_of(name)).startswith(refusal)


@pytest.mark.parametrize(("flag", "key", "status"), [row for row in ROWS if row[2] != "works"])
def test_any_other_row_is_refused_with_the_reason_and_what_to_do(
    serve: Callable[..., str], flag: str, key: str, status: str
) -> None:
    name = VLLM_NAMES[flag[2:].replace("-", "_")]
    if name.type == "switch" and {True, False} <= set(name.no_effect):
        assert serve("./model", flag).startswith(LISTENS)
        return
    said = serve("./model", *value_of(name))
    assert said.startswith(f"--{'no-' if value_of(name)[0].startswith('--no-') else ''}{flag[2:]}=")
    assert said.endswith(f"is {status}: {name.note}; {name.instead}")


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-chunked-prefill", "True"],
        ["--enable-chunked-prefill=false"],
        ["--enable_chunked_prefill=False"],
        ["--no-enable-chunked-prefill"],
        ["--multi-step-stream-outputs", "true"],
        ["--served-model-name", "a", "b", "--port", "1"],
        ["--served-model-name=a"],
        ["--api-key", "a", "b"],
        ["--lora-modules", "a=b", '{"name": "c", "path": "d", "base_model_name": "e"}', "--port", "1"],
    ],
)
def test_flags_are_written_as_vllm_has_them(serve: Callable[..., str], flags: list[str]) -> None:
    assert serve("./model", *flags).startswith(LISTENS)


def test_a_value_of_a_switch_counts(serve: Callable[..., str]) -> None:
    assert "--multi-step-stream-outputs=False is refused" in serve(
        "./m", "--multi-step-stream-outputs", "False"
    ).replace("--no-", "--")


def test_the_model_may_stand_behind_one_name(serve: Callable[..., str]) -> None:
    assert serve("--served-model-name", "a", "./model").startswith(LISTENS)
