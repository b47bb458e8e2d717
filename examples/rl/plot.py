"""Draws what colocated.py and two_processes.py wrote: the reward of each step, its mean over seeds and the 95% interval
of that mean (Student's t), smoothed over SMOOTHING steps. Needs matplotlib.

    python examples/rl/plot.py rewards.svg colocated.json two_processes.json
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np

from dovetail.commands.student import t_quantile

matplotlib.use("svg")
from matplotlib import pyplot

SMOOTHING = 4


def smoothed(rewards: np.ndarray) -> np.ndarray:
    """Means over the last SMOOTHING steps; [runs, steps]."""
    sums = np.cumsum(np.pad(rewards, ((0, 0), (1, 0))), axis=1)
    ends = np.arange(1, rewards.shape[1] + 1)
    begins = np.maximum(0, ends - SMOOTHING)
    return (sums[:, ends] - sums[:, begins]) / (ends - begins)


def main() -> None:
    """Writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    given = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "rewards"  # equal files for equal results
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for path, style in zip(given.results, cycle(("-", "--", ":"))):  # runs with equal seeds may have equal rewards
        rewards = smoothed(np.array([[step["reward"] for step in run] for run in json.loads(path.read_text())]))
        runs, steps = rewards.shape
        mean = rewards.mean(0)
        (line,) = axes.plot(range(steps), mean, style, label=f"{path.stem}, {runs} seeds")
        if runs > 1:
            half = t_quantile(runs - 1) * rewards.std(0, ddof=1) / np.sqrt(runs)
            axes.fill_between(range(steps), mean - half, mean + half, color=line.get_color(), alpha=0.2)
        for run in rewards:
            axes.plot(range(steps), run, color=line.get_color(), alpha=0.25, linewidth=0.7)
    axes.set(xlabel="step", ylabel="share of short sentences", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(given.plot, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
