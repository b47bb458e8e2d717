"""How long the commands take that load no model, and `import dovetail`.

python benchmarks/startup.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass (the interpreter alone)": ["-c", "pass"],
    "import dovetail": ["-c", "import dovetail"],
    "dovetail --help": ["-m", "dovetail", "--help"],
    "dovetail plugins list": ["-m", "dovetail", "plugins", "list"],
}


def seconds(arguments: list[str]) -> float:
    """Time of one process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    print("| | s, median (min-max) |\n| --- | --- |")
    for name, arguments in COMMANDS.items():
        times = [seconds(arguments) for _ in range(repeats)]
        print(f"| {name} | {statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f}) |")


if __name__ == "__main__":
    main()
