"""Run by `make wheel-smoke` in an environment that holds only the wheel: what is installed lists, explains, loads and
generates, with a random model made on the spot, and shows its documentation."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

SCRIPTS = Path(sys.executable).parent


def run(*arguments: str) -> str:
    """Runs the installed command and returns what it printed."""
    completed = subprocess.run([str(SCRIPTS / "dovetail"), *arguments], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def read_docs(page: str) -> str:
    """A page as `dovetail docs` serves it, and nothing that the process printed on stderr."""
    command = [str(SCRIPTS / "dovetail"), "docs", page, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1) as served:
        assert served.stdout is not None
        address = served.stdout.readline().partition(" ")[0]
        assert address.startswith("http://127.0.0.1:"), address + served.communicate()[1]
        with urlopen(address, timeout=60) as answer:
            text: str = answer.read().decode()
        served.terminate()
        assert served.communicate(timeout=60)[1] == ""
    return text


def main() -> None:
    """Fails with the first thing that does not work."""
    import dovetail

    here = Path(dovetail.__file__).resolve()
    assert "site-packages" in here.parts, f"the wheel is not what is imported: {here}"
    assert "fcfs" in run("plugins", "list")
    # The first of them imports torch, which nobody has compiled there.
    assert "ok" in run("plugins", "doctor", "--all", "--timeout", "600")

    assert "made of plugins" in read_docs("index")
    assert "num_missing_blocks" in read_docs("contracts/scheduler"), "the page of a contract lacks its docstrings"

    from dovetail import LLM, SamplingParams
    from dovetail.testing.tiny_models import save_tiny_model, tiny_config

    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        save_tiny_model(model, tiny_config("llama"))
        config = {"path": str(model), "tokenizer_mode": "none", "dtype": "float32"}
        with LLM(model=config, cache={"memory_gib": 0.05}) as llm:
            outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]
        assert "max_model_len" in run("explain", "-o", f"model.path={model}", "-o", "model.tokenizer_mode=none")
    print("wheel smoke test: ok")


if __name__ == "__main__":
    main()
