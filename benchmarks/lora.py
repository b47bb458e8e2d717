"""Low-rank adapters: what they cost beside the base model, and whether tokens are those of the library PEFT.

    python benchmarks/lora.py speed [--model PATH] [--rank 16] [--rounds 9]     # base, one adapter, eight and the base
        [--lora-dtype bfloat16]
    python benchmarks/lora.py many [--model PATH]                               # 65 adapters over 4 slots; each alone
    python benchmarks/lora.py peft --model PATH --adapter PATH                  # tokens beside peft (pip install peft)

`--model` is a folder with model.safetensors, a GGUF file, or left out for the model that comes with Dovetail. Adapters
of `speed` and `many` are random, of all linear layers.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dovetail import LLM, LoRARequest, SamplingParams
from dovetail.plugins.model_sources.package import DEFAULT_MODEL, PackageSource
from dovetail.testing.tiny_adapters import PREFIX

GGUF_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Llama's layers, as GGUF and as Hugging Face call them."""
NUM_REQUESTS, MAX_TOKENS = 18, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "many", "peft"))
    parser.add_argument("--model", type=Path, help="default: the model that comes with Dovetail")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--dtype", help="default: what the checkpoint asks for")
    parser.add_argument("--lora-dtype", default="auto", help="dtype of the slots")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"speed": speed, "many": many, "peft": peft}[options.what](options, Path(folder))


def engine(options: argparse.Namespace, max_loras: int, **sections: Any) -> LLM:
    model: dict[str, Any] = {} if options.dtype is None else {"dtype": options.dtype}
    if options.model is not None:
        model["path"] = str(options.model)
    lora = {"enabled": True, "max_loras": max_loras, "max_rank": options.rank, "dtype": options.lora_dtype}
    return LLM(model=model, lora=lora, cache={"prefix_caching": False}, **sections)


def shapes(model: Path | None) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each linear layer, by its name in a Hugging Face checkpoint."""
    from safetensors import safe_open

    if model is not None and model.is_dir():
        with safe_open(model / "model.safetensors", "pt") as file:
            wanted = tuple(f"{layer}.weight" for layer in GGUF_LAYERS.values())
            names = [name for name in file.keys() if name.endswith(wanted)]  # noqa: SIM118
            return {name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape()) for name in names}
    from gguf import GGUFReader

    found: dict[str, tuple[int, int]] = {}
    for tensor in GGUFReader(gguf_file(model)).tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        if (layer := GGUF_LAYERS.get(rest.removesuffix(".weight"))) is not None:
            in_features, out_features = map(int, tensor.shape)
            found[f"model.layers.{block}.{layer}"] = out_features, in_features
    return found


def gguf_file(model: Path | None) -> Path:
    if model is not None:
        return model
    _, _, package = DEFAULT_MODEL.partition(":")
    return PackageSource(PackageSource.Options()).resolve(package).path


def random_adapter(folder: Path, layers: Mapping[str, tuple[int, int]], seed: int, rank: int) -> Path:
    """An adapter of all layers, as PEFT writes it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (out_features, in_features) in layers.items():
        a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        b = torch.randn(out_features, rank, generator=generator) * 0.05
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    path = folder / f"adapter-{seed}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(values))
    return path


def adapters_in(folder: Path, options: argparse.Namespace, count: int) -> list[LoRARequest]:
    layers = shapes(options.model)
    paths = [random_adapter(folder, layers, seed, options.rank) for seed in range(count)]
    return [LoRARequest(path.name, 0, str(path)) for path in paths]


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(100, 5000) for _ in range(24)] for _ in range(count)]


def generated(llm: LLM, requests: Sequence[LoRARequest | None], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts(len(requests)), params, use_tqdm=False, lora_request=list(requests))
    return [list(output.outputs[0].token_ids) for output in outputs]


def speed(options: argparse.Namespace, folder: Path) -> None:
    adapters = adapters_in(folder, options, 8)
    arms: dict[str, list[LoRARequest | None]] = {
        "base": [None] * NUM_REQUESTS,
        "one adapter": [adapters[0]] * NUM_REQUESTS,
        "8 adapters and the base": [[*adapters, None][index % 9] for index in range(NUM_REQUESTS)],
    }
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    with engine(options, 8) as llm:
        for requests in arms.values():
            generated(llm, requests, 8)
        draw = random.Random(1)
        for _ in range(options.rounds):
            for arm in draw.sample(list(arms), len(arms)):
                started = time.perf_counter()
                generated(llm, arms[arm])
                seconds[arm].append(time.perf_counter() - started)
    print(f"{NUM_REQUESTS} requests at once, {MAX_TOKENS} tokens each, rank {options.rank}, all linear layers")
    print(f"lora.dtype {options.lora_dtype}\n")
    print("| | tokens/s, median | of the base's, median of paired rounds | least and most |")
    print("| --- | --- | --- | --- |")
    for arm, times in seconds.items():
        ratios = sorted(base / own for base, own in zip(seconds["base"], times, strict=True))
        rate = NUM_REQUESTS * MAX_TOKENS / median(times)
        print(f"| {arm} | {rate:.0f} | {median(ratios):.3f} | {ratios[0]:.3f}, {ratios[-1]:.3f} |")


def many(options: argparse.Namespace, folder: Path) -> None:
    adapters = adapters_in(folder, options, 65)
    with engine(options, 4) as llm:
        started = time.perf_counter()
        together = generated(llm, adapters, 16)
        seconds = time.perf_counter() - started
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        alone = [
            list(llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)[0].outputs[0].token_ids)
            for prompt, adapter in zip(prompts(65), adapters, strict=True)
        ]
        base = generated(llm, [None] * 65, 16)
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    differ = sum(a != b for a, b in zip(together, base, strict=True))
    print(f"65 adapters over 4 slots, loaded as their requests come: {seconds:.1f} s")
    print(f"{same} of 65 have the tokens of a run alone; {differ} differ from the base")


def peft(options: argparse.Namespace, folder: Path) -> None:
    """Greedy tokens and log probabilities of the first token."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(theirs, str(options.adapter)).eval()
    asked = prompts(16)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
    request = LoRARequest("given", 0, str(options.adapter))
    with engine(options, 1) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False, lora_request=request)
    same, worst = 0, 0.0
    for prompt, output in zip(asked, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, min_new_tokens=48, do_sample=False
            )[0, len(prompt) :].tolist()
            rows = theirs(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = list(output.outputs[0].token_ids)
        same += found == expected
        if found == expected:
            own = torch.tensor([next(iter(place.values())).logprob for place in output.outputs[0].logprobs])
            worst = max(worst, float((rows.gather(1, torch.tensor(expected)[:, None])[:, 0] - own).abs().max()))
    print(f"{same} of {len(asked)} requests have peft's greedy tokens; log probabilities differ by {worst:.2g} at most")


if __name__ == "__main__":
    main()
