"""`batch run` against a scripted server on a real socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.batch.command import BatchCommand
from dovetail.plugins.commands.batch.output import read_output
from dovetail.plugins.commands.batch.runner import pause_before_retry
from dovetail.testing.story_model import save_story_model


def line(name: str, prompt: str = "hello", model: str | None = "usage", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3} | ({} if model is None else {"model": model})
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | more


def write(tmp_path: Path, lines: list[Any]) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in lines))
    return file


def run(tmp_path: Path, server: Any, *options: str) -> Any:
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    return CliRunner().invoke(BatchCommand().app(), ["run", *files, "--base-url", server.url, *options])


def answers(tmp_path: Path) -> dict[str, Any]:
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len({item["custom_id"] for item in lines}) == len(lines)
    return {item["custom_id"]: item for item in lines}


def test_each_request_gets_the_servers_answer_under_its_id(tmp_path: Path, server: Any) -> None:
    chat = {"model": "usage", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    write(tmp_path, [line("a"), line("b", max_tokens=1), line("c", url="/v1/chat/completions", body=chat), "", " "])
    found = run(tmp_path, server)
    assert found.exit_code == 0, found.output
    lines = answers(tmp_path)
    assert set(lines) == {"a", "b", "c"}
    assert lines["a"]["response"]["status_code"] == 200
    assert lines["a"]["response"]["body"]["choices"][0]["text"] == "<0><1><2>"
    assert lines["a"]["error"] is None
    assert len({item["id"] for item in lines.values()}) == 3
    assert [body for body in server.bodies if "messages" in body] == [chat]
    assert "3 answered, 0 failed, 0 invalid lines, 27 prompt and 8 output tokens" in found.stderr


INVALID = {
    "{": "no JSON",
    "[1]": "no JSON object",
    json.dumps(line("")): "custom_id must be a text",
    json.dumps(line("x", method="GET")): "method must be 'POST'",
    json.dumps(line("x", url="/v1/embeddings")): "url must be",
    json.dumps(line("x", body="text")): "body must be an object",
    json.dumps(line("x", body={"model": "m", "stream": True})): "leave stream out",
    json.dumps(line("x", model=None)): "give --model",
    json.dumps(line("first")): "that of line 1 too",
}


@pytest.mark.parametrize("bad", INVALID)
def test_an_invalid_line_is_reported_with_its_number_and_stops_no_other(tmp_path: Path, server: Any, bad: str) -> None:
    write(tmp_path, [line("first"), bad, line("last")])
    found = run(tmp_path, server)
    assert found.exit_code == 1
    assert f"in.jsonl:2: {INVALID[bad]}" in found.stderr or INVALID[bad] in found.stderr.partition("in.jsonl:2: ")[2]
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {item["custom_id"] for item in lines if item["response"] is not None} == {"first", "last"}
    (refused,) = [item for item in lines if item["response"] is None]
    given = json.loads(bad).get("custom_id") if bad not in ("{", "[1]") else None
    assert refused["custom_id"] == (given or None)
    assert refused["error"]["code"] == "invalid_line"
    assert refused["error"]["message"].startswith("line 2: ")
    assert INVALID[bad] in refused["error"]["message"]


def test_resume_takes_corrected_lines_and_says_the_others_again(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a"), line("b", method="GET"), "{", line("a", "again")])
    assert run(tmp_path, server).exit_code == 1
    write(tmp_path, [line("a"), line("b", "corrected"), "{"])
    assert "1 answered, 0 failed, 1 invalid lines, 1 were done before" in run(tmp_path, server, "--resume").stderr
    lines = answers(tmp_path)
    assert set(lines) == {"a", "b", None}
    assert lines["b"]["response"]["status_code"] == 200
    assert lines[None]["error"]["message"].startswith("line 3: no JSON")


@pytest.mark.parametrize("link", ["none", "symbolic", "hard"])
def test_the_input_is_never_the_output(tmp_path: Path, server: Any, link: str) -> None:
    given = write(tmp_path, [line("a")])
    output = given if link == "none" else tmp_path / "link.jsonl"
    if link == "symbolic":
        output.symlink_to(given)
    if link == "hard":
        output.hardlink_to(given)
    before = given.read_bytes()
    files = ["-i", str(given), "-o", str(output), "--overwrite"]
    found = CliRunner().invoke(BatchCommand().app(), ["run", *files, "--base-url", server.url])
    assert isinstance(found.exception, ConfigError)
    assert "is the file of --input" in str(found.exception)
    assert given.read_bytes() == before


@pytest.mark.parametrize(("header", "pause"), [("0", 0.0), ("5", 5.0), ("86400", 60.0), ("9" * 400, 60.0)])
def test_the_pause_that_a_server_asks_for_is_kept_up_to_a_minute(header: str, pause: float) -> None:
    assert pause_before_retry(0, header) == pause


@pytest.mark.parametrize("header", ["\xb2", "soon", "Tue, 24 Nov 2026 01:00:00 GMT"])
def test_a_pause_that_is_no_number_of_seconds_is_the_batchs_own(header: str) -> None:
    assert 0 < pause_before_retry(0, header) <= 0.5


def test_a_body_without_a_model_gets_the_one_given(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a", model=None), line("b", model="usage")])
    assert run(tmp_path, server, "--model", "other").exit_code == 0
    assert sorted(body["model"] for body in server.bodies) == ["other", "usage"]


def test_an_error_of_the_server_is_its_answer(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a", "fault", "500"), line("b")])
    found = run(tmp_path, server, "--max-retries", "0")
    assert found.exit_code == 1
    assert "line 1 (a): status 500: it broke" in found.stderr
    failed = answers(tmp_path)["a"]
    assert failed["response"]["status_code"] == 500
    assert failed["response"]["body"] == {"error": {"message": "it broke", "type": "server_error"}}
    assert answers(tmp_path)["b"]["response"]["status_code"] == 200


def test_no_answer_is_an_error_object(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a")])
    server.url = "http://127.0.0.1:1"
    found = run(tmp_path, server, "--max-retries", "0")
    assert found.exit_code == 1
    failed = answers(tmp_path)["a"]
    assert failed["response"] is None
    assert failed["error"]["code"] == "connect"
    assert "ConnectError" in failed["error"]["message"]


def test_a_server_that_is_busy_is_asked_again(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a", "fault", "429-once"), line("b", "fault too", "429")])
    found = run(tmp_path, server, "--max-retries", "2")
    assert found.exit_code == 1
    lines = answers(tmp_path)
    assert lines["a"]["response"]["status_code"] == 200
    assert lines["b"]["response"]["status_code"] == 429
    assert server.seen == {"fault": 2, "fault too": 3}


def test_the_limit_is_kept(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line(str(index), f"prompt {index}") for index in range(20)])
    assert run(tmp_path, server, "--max-concurrency", "3").exit_code == 0
    assert len(answers(tmp_path)) == 20
    assert server.most_in_flight <= 3


def test_resume_asks_what_is_missing(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a", "one"), line("b", "fault", "500-once")])
    assert run(tmp_path, server, "--max-retries", "0").exit_code == 1
    write(tmp_path, [line("a", "one"), line("b", "fault", "500-once"), line("c", "three")])
    found = run(tmp_path, server, "--resume")
    assert "1 answered, 0 failed, 0 invalid lines, 2 were done before" in found.stderr
    assert server.seen == {"one": 1, "fault": 1, "three": 1}
    assert run(tmp_path, server, "--retry-failed").exit_code == 0
    assert server.seen == {"one": 1, "fault": 2, "three": 1}
    assert {item["response"]["status_code"] for item in answers(tmp_path).values()} == {200}


def test_an_output_with_answers_is_neither_mixed_nor_lost_unasked(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a")])
    assert run(tmp_path, server).exit_code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    found = run(tmp_path, server)
    assert isinstance(found.exception, ConfigError)
    assert "--resume" in str(found.exception)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run(tmp_path, server, "--overwrite").exit_code == 0
    assert len(answers(tmp_path)) == 1
    assert (tmp_path / "out.jsonl").read_bytes() != before


def test_a_line_that_a_crash_cut_off_is_asked_again(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a", "one"), line("b", "two")])
    run(tmp_path, server, "--max-concurrency", "1")
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    first, second = whole.splitlines(keepends=True)
    for cut in range(len(second)):
        out.write_bytes(first + second[:cut])
        assert read_output(out, drop_failed=False).answered == {"a"}
        assert out.read_bytes() == first
    assert run(tmp_path, server, "--resume").exit_code == 0
    assert set(answers(tmp_path)) == {"a", "b"}
    assert server.seen == {"one": 1, "two": 2}


def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line("a")])
    other = tmp_path / "out.jsonl"
    other.write_text('{"my": "data"}\n')
    found = run(tmp_path, server, "--resume")
    assert isinstance(found.exception, ConfigError)
    assert "out.jsonl:1 is no line of a batch's output" in str(found.exception)
    assert other.read_text() == '{"my": "data"}\n'


def test_ctrl_c_leaves_whole_lines_and_resume_goes_on(tmp_path: Path, server: Any) -> None:
    write(tmp_path, [line(str(index), f"prompt {index}") for index in range(40)])
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hold(body: dict[str, Any]) -> None:
        if len(server.bodies) == 10:
            has_begun.set()
            may_go_on.wait(60)

    server.on_request = hold
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    code = "import sys; from dovetail.commands.main import main; sys.argv[0] = 'dovetail'; main()"
    options = ["--base-url", server.url, "--max-concurrency", "2"]
    with subprocess.Popen(
        [sys.executable, "-c", code, "batch", "run", *files, *options],
        stderr=subprocess.PIPE,
        text=True,
        # As at a terminal: what a shell starts in the background ignores the signal, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert has_begun.wait(120)
        os.kill(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=120)
        may_go_on.set()
    assert process.returncode == 130
    assert "go on with --resume" in told
    done = answers(tmp_path)
    assert 8 <= len(done) < 40
    assert f"{40 - len(done)} requests left" in told
    assert run(tmp_path, server, "--resume").exit_code == 0
    assert len(answers(tmp_path)) == 40


def test_a_full_disk_is_told(tmp_path: Path, server: Any) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    write(tmp_path, [line(str(index)) for index in range(4)])
    (tmp_path / "out.jsonl").symlink_to("/dev/full")
    found = run(tmp_path, server, "--resume")
    assert isinstance(found.exception, DovetailError)
    assert "make room, and go on with --resume" in str(found.exception)


def run_alone(tmp_path: Path, *options: str) -> Any:
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    return CliRunner().invoke(BatchCommand().app(), ["run", *files, *options])


def test_without_a_url_it_starts_a_server_for_the_batch(tmp_path: Path) -> None:
    save_story_model(tmp_path / "story")
    write(tmp_path, [line("a", "Lily saw", model=None), line("b", "Lily saw", model="other")])
    options = ["cache.num_blocks=100", "executor.threads=1", "model.max_model_len=64"]
    found = run_alone(
        tmp_path, "--model", str(tmp_path / "story"), *(part for option in options for part in ("--option", option))
    )
    assert found.exit_code == 1, found.output + repr(found.exception)
    lines = answers(tmp_path)
    assert lines["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert lines["b"]["response"]["status_code"] == 404
    assert not [child for child in psutil.Process().children() if "serve" in child.cmdline()]


def test_a_server_that_cannot_start_is_told(tmp_path: Path) -> None:
    write(tmp_path, [line("a")])
    found = run_alone(tmp_path, "--model", str(tmp_path / "none"))
    assert isinstance(found.exception, DovetailError)
    assert "ended with code 1 before it was ready" in str(found.exception)


def test_what_is_served_is_said_once(tmp_path: Path) -> None:
    write(tmp_path, [line("a")])
    both = run_alone(tmp_path, "--model", "m", "--config", "c.yaml")
    assert isinstance(both.exception, ConfigError)
    assert "keep one" in str(both.exception)
    url = run_alone(tmp_path, "--base-url", "http://127.0.0.1:1", "--config", "c.yaml")
    assert isinstance(url.exception, ConfigError)
    assert "leave out --base-url" in str(url.exception)
