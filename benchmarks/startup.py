"""How long the commands take that load no model, `import dovetail`, and `dovetail generate` to its first token.

python benchmarks/startup.py [--repeats 7] [--model PATH ...]

The commands run in turn, after one round that is not counted and that fills the caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

_TORCH = 'python -c "import torch"'
COMMANDS = {
    "python -c pass (the interpreter alone)": ["-c", "pass"],
    "import dovetail": ["-c", "import dovetail"],
    "dovetail --help": ["-m", "dovetail", "--help"],
    "dovetail plugins list": ["-m", "dovetail", "plugins", "list"],
    _TORCH: ["-c", "import torch"],
}


def generate(model: str | None) -> list[str]:
    """Arguments of a start that prints one token."""
    arguments = ["-m", "dovetail", "generate", "The tide", "--max-tokens", "1"]
    return arguments if model is None else [*arguments, "--model", model]


def seconds(arguments: list[str]) -> float:
    """Time of one process: to its first output where it generates, which is the first token, or else to its end."""
    # Installed packages have their bytecode on disk, whatever this shell says.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1 if "generate" in arguments else -1)
        if "generate" in arguments:
            took = time.perf_counter() - started
            process.stdout.read()
            process.wait()
        else:
            process.wait()
            took = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return took


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", action="append", default=[], help="beside the embedded one; may be repeated")
    parser.add_argument("--only-generate", action="store_true", help="leave out the commands that load no model")
    options = parser.parse_args()
    commands = {name: arguments for name, arguments in COMMANDS.items() if name == _TORCH or not options.only_generate}
    for model in (None, *options.model):
        commands[f"dovetail generate, first token{'' if model is None else f', {model}'}"] = generate(model)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for repetition in range(-1, options.repeats):
        for name, arguments in commands.items():
            took = seconds(arguments)
            if repetition >= 0:
                times[name].append(took)
    base = statistics.median(times[_TORCH])
    print("| | s, median (min-max) | beside import torch |\n| --- | --- | --- |")
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:.2f} ({min(found):.2f}-{max(found):.2f}) | {middle / base:.2f}x |")


if __name__ == "__main__":
    main()
