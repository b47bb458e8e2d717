"""EAGLE heads with random weights through the whole engine. They guess badly, so equal output says little of them;
what says it is an oracle in plain torch without a cache, which must make the same guesses from the same tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import RotatesAndWrites
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.speculation import Draft
from dovetail.nn.operators import torch_operators
from dovetail.registry.components import validate_options
from dovetail.spec_decode.eagle.drafter import EagleDrafter
from dovetail.spec_decode.growing_tree import GrowingTree
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.forward import GraphForward
from dovetail.worker.speculation.verifier import first_nodes

NUM_TOKENS = 16
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
HIDDEN, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, SIZE, LAYERS = 64, 128, 40, 4, 2, 16, 4

LOGGED = """
import json
from pathlib import Path

from dovetail.spec_decode.eagle.drafter import EagleDrafter, EagleOptions


class LoggedOptions(EagleOptions):
    log: Path


class Logged(EagleDrafter):
    Options = LoggedOptions

    def propose(self, batch):
        drafts = super().propose(batch)
        with self.options.log.open("a") as file:
            for request, draft in zip(batch.requests, drafts):
                if draft is not None:
                    parents = None if draft.parents is None else list(draft.parents)
                    line = [request.token_ids.tolist(), list(draft.token_ids), parents, request.max_drafts]
                    print(json.dumps(line), file=file)
        return drafts
"""

CAPTURABLE = f"{Path(__file__).parents[1] / 'executors' / 'capturable.py'}:Capturable"
Tensors = dict[str, torch.Tensor]


def random_head(version: int) -> Tensors:
    """Weights in the names of the `speculators` format, EAGLE-3 with a vocabulary of its own."""
    generator = torch.Generator().manual_seed(version)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=generator)

    width = 2 * HIDDEN if version == 3 else HIDDEN
    tensors = {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN if version == 3 else 2 * HIDDEN),
        "layers.0.self_attn.q_proj.weight": weight(HEADS * SIZE, width),
        "layers.0.self_attn.k_proj.weight": weight(KV_HEADS * SIZE, width),
        "layers.0.self_attn.v_proj.weight": weight(KV_HEADS * SIZE, width),
        "layers.0.self_attn.o_proj.weight": weight(HIDDEN, HEADS * SIZE),
        "layers.0.mlp.gate_proj.weight": weight(96, HIDDEN),
        "layers.0.mlp.up_proj.weight": weight(96, HIDDEN),
        "layers.0.mlp.down_proj.weight": weight(HIDDEN, 96),
        "layers.0.post_attention_layernorm.weight": norm(),
    }
    if version == 3:
        targets = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        tensors |= {
            "layers.0.input_layernorm.weight": norm(),
            "layers.0.hidden_norm.weight": norm(),
            "norm.weight": norm(),
            "lm_head.weight": weight(DRAFT_VOCAB, HIDDEN),
            "d2t": targets - torch.arange(DRAFT_VOCAB),
            "t2d": torch.isin(torch.arange(VOCAB), targets),
        }
    return tensors


def head_config(version: int, **overrides: Any) -> dict[str, Any]:
    layer = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1,
    }
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3" if version == 3 else "eagle",
        "transformer_layer_config": layer,
    }
    if version == 3:
        config |= {"draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True}
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    return config | overrides


def save_head(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


class Oracle:
    """EAGLE-1 and EAGLE-3 as the papers have them, everything computed anew for every guess."""

    def __init__(self, model: Any, version: int, tensors: Tensors):
        self.model, self.version, self.w = model, version, tensors
        self.targets = torch.arange(DRAFT_VOCAB) + tensors["d2t"] if version == 3 else torch.arange(VOCAB)

    @torch.no_grad()
    def features(self, tokens: list[int]) -> torch.Tensor:
        """Of each position of `tokens`."""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True)
        if self.version == 1:
            return out.hidden_states[-1][0]
        captured: list[torch.Tensor] = [out.hidden_states[1][0], out.hidden_states[2][0]]
        # What enters the final norm is not among transformers' hidden states: the last of those is normed.
        kept: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
        self.model(torch.tensor([tokens]))
        hook.remove()
        return torch.cat([*captured, kept[0]], dim=-1) @ self.w["fc.weight"].T

    @torch.no_grad()
    def log_probs(self, tokens: list[int], num_known: int) -> torch.Tensor:
        """For the token after `tokens`, of which the target has seen the first `num_known` - 1."""
        features = self.features(tokens[: num_known - 1])
        for end in range(num_known, len(tokens) + 1):
            after, ready = self.layer(torch.tensor(tokens[1:end]), features)
            features = torch.cat([features, after[-1:]])
        logits = ready[-1] @ (self.w["lm_head.weight"] if self.version == 3 else self.model.lm_head.weight).T
        return logits.log_softmax(-1)

    def layer(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, embeds = self.w, self.model.get_input_embeddings()(tokens)
        if self.version == 3:
            x = norm(features, w["layers.0.hidden_norm.weight"])
            attended = torch.cat([norm(embeds, w["layers.0.input_layernorm.weight"]), x], dim=-1)
        else:
            x = attended = torch.cat([embeds, features], dim=-1) @ w["fc.weight"].T
        x = x + self.attend(attended)
        y = norm(x, w["layers.0.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ w["layers.0.mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ w["layers.0.mlp.up_proj.weight"].T)) @ w["layers.0.mlp.down_proj.weight"].T
        return x, norm(x, w["norm.weight"]) if self.version == 3 else x

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        def heads(name: str) -> torch.Tensor:
            return (x @ self.w[f"layers.0.self_attn.{name}.weight"].T).view(len(x), -1, SIZE).transpose(0, 1)

        query, key, value = rotate(heads("q_proj")), rotate(heads("k_proj")), heads("v_proj")
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(0, 1).reshape(len(x), -1) @ self.w["layers.0.self_attn.o_proj.weight"].T

    def chain(self, known: list[int], count: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(count):
            best = int(self.log_probs(known + drafted, len(known)).argmax())
            drafted.append(int(self.targets[best]))
        return drafted

    def tree(self, known: list[int], count: int, top_k: int, depth: int) -> dict[tuple[int, ...], float]:
        """The best `count` paths of a tree whose `top_k` best nodes of each depth have children, with their scores."""
        scores: dict[tuple[int, ...], float] = {}
        frontier: list[tuple[int, ...]] = [()]
        num_inner = 0
        for level in range(depth):
            children = {}
            for path in frontier:
                top = self.log_probs(known + list(path), len(known)).topk(top_k)
                for token, score in zip(self.targets[top.indices].tolist(), top.values.tolist(), strict=True):
                    children[(*path, token)] = scores.get(path, 0.0) + score
            scores |= children
            best = sorted(children, key=lambda path: -children[path])[:top_k]
            frontier = best[: max(0, count - 1 - num_inner)] if level < depth - 1 else []
            num_inner += len(frontier)
        return dict(sorted(scores.items(), key=lambda item: -item[1])[:count])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-5)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """[heads, positions, SIZE], turned by the position; the base is Llama's 10,000."""
    angles = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    swapped = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * cos + swapped * sin


class Target:
    """A tiny target, prompts, and its greedy tokens by transformers."""

    def __init__(self, directory: Path):
        self.path = directory / "target"
        self.model = save_tiny_model(self.path, tiny_config("llama", num_hidden_layers=LAYERS))
        self.plugin = directory / "logged.py"
        self.plugin.write_text(LOGGED)
        self.heads = {i: save_head(directory / f"eagle{i}", head_config(i), random_head(i)) for i in (1, 3)}
        draw = random.Random(4)
        self.prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.choice([2, 9, 26]))] for _ in range(8)]
        self.answers = [self.greedy(prompt) for prompt in self.prompts]

    def greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        found: list[int] = out[0, len(prompt) :].tolist()
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("eagle"))


@pytest.fixture
def make_llm(target: Target, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """An `LLM` over the tiny target with one head that writes its guesses to `log`."""
    created: list[LLM] = []

    def make(path: Path, *, logged: bool = False, num_tokens: int = 4, **sections: Any) -> LLM:
        # In full precision, as the oracles compute.
        drafter: dict[str, Any] = {"name": "eagle", "path": str(path), "num_tokens": num_tokens, "length": "fixed"}
        drafter["quantization"] = None
        if logged:
            drafter |= {"name": f"{target.plugin}:Logged", "log": str(tmp_path / "log")}
        model = {"path": str(target.path), "tokenizer_mode": "none", "dtype": "float32"}
        llm = LLM(
            model=model | sections.pop("model", {}),
            cache={"block_size": 4, "num_blocks": 300} | sections.pop("cache", {}),
            executor={"threads": 1} | sections.pop("executor", {}),
            speculative={"drafters": {"it": drafter | sections.pop("options", {})}},
            **sections,
        )
        created.append(llm)
        return llm

    yield make
    for llm in created:
        assert llm.engine.cache_statistics().num_used_blocks == 0
        llm.shutdown()


def rounds(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / "log").read_text().splitlines()]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("scheduler", [{"max_num_seqs": 8}, {"max_num_batched_tokens": 10, "max_num_seqs": 4}])
def test_chains_are_those_of_the_oracle(
    target: Target, make_llm: Callable[..., LLM], tmp_path: Path, version: int, scheduler: dict[str, int]
) -> None:
    llm = make_llm(target.heads[version], logged=True, num_tokens=3, scheduler=scheduler)
    assert tokens_of(llm.generate(target.prompts, PARAMS)) == target.answers
    oracle = Oracle(target.model, version, random_head(version))
    seen = rounds(tmp_path)
    assert len(seen) > 50
    for known, drafted, _, _ in seen[::4]:
        assert drafted == oracle.chain(known, len(drafted))


class RotatingReference(ReferenceBackend, RotatesAndWrites):
    """A third party's backend that rotates by itself, and wants nothing that is rotated already."""

    contract = (1, 0)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any) -> torch.Tensor:
        raise AssertionError("the host has rotated")

    def rotate_and_forward(
        self, layer: Any, query: Any, key: Any, value: Any, cos: Any, sin: Any, kv_cache: Any
    ) -> torch.Tensor:
        rotate = torch_operators().rotate
        return super().forward(layer, rotate(query, cos, sin), rotate(key, cos, sin), value, kv_cache)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(
    "attention", ["reference", "auto", pytest.param(f"{__file__}:RotatingReference", id="rotating")]
)
def test_trees_are_those_of_the_oracle(
    target: Target, make_llm: Callable[..., LLM], tmp_path: Path, version: int, attention: str
) -> None:
    options = {"top_k": 3, "depth": 3, "attention": attention}
    llm = make_llm(target.heads[version], logged=True, num_tokens=7, options=options)
    assert tokens_of(llm.generate(target.prompts[:4], PARAMS)) == target.answers[:4]
    oracle = Oracle(target.model, version, random_head(version))
    for known, drafted, parents, count in rounds(tmp_path)[::6]:
        paths = paths_of(Draft(drafted, parents))
        assert paths == set(oracle.tree(known, count, 3, 3))
        assert len(paths) == len(drafted)


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parent_indices, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_the_first_nodes_of_a_tree_are_the_best_tree_of_that_size(seed: int) -> None:
    random_scores = random.Random(seed)
    scores: dict[tuple[int, ...], float] = {}
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    tree = GrowingTree(20)
    nodes = [-1]
    for _ in range(4):
        for node in nodes:
            log_probs = [-random_scores.expovariate(1.0) for _ in range(3)]
            for token, log_prob in enumerate(log_probs):
                paths[len(paths) - 1] = (*paths[node], token)
                scores[*paths[node], token] = scores.get(paths[node], 0.0) + log_prob
            tree.add_children(node, [0, 1, 2], log_probs)
        nodes = tree.choose_inner(2)
    best = sorted(scores, key=lambda path: -scores[path])
    draft = tree.draft(12)
    assert draft is not None
    for count in range(1, 13):
        assert paths_of(first_nodes(draft, count)) == set(best[:count])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 4}, "top_k 1 asks for chains, which go as deep as num_tokens: leave it out, or set top_k to 2"),
        ({"top_k": 2, "stop_below": 0.5}, "stop_below ends chains.*leave it out, or set top_k to 1"),
    ],
)
def test_options_of_the_other_shape_are_refused(
    target: Target, make_llm: Callable[..., LLM], options: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_llm(target.heads[1], options=options)


@pytest.mark.parametrize("version", [1, 3])
def test_cached_prefixes_hold_the_right_pages(
    target: Target, make_llm: Callable[..., LLM], tmp_path: Path, version: int
) -> None:
    """Also where the next token, on which the last page of the prefix depends, is another."""
    llm = make_llm(target.heads[version], logged=True, num_tokens=3)
    prompt = [7, 19, 33, 4, 90, 61, 17, 25, 80, 99, 101, 5, 66, 42, 77, 31]
    llm.generate([prompt], PARAMS)
    (tmp_path / "log").unlink()
    for cut, more in ((12, [3, 9, 10, 11, 12, 13]), (8, [100, 9]), (16, [21, 22])):
        output = llm.generate([prompt[:cut] + more], PARAMS)[0]
        assert output.num_cached_tokens >= 4
    oracle = Oracle(target.model, version, random_head(version))
    for known, drafted, _, _ in rounds(tmp_path)[::3]:
        assert drafted == oracle.chain(known, len(drafted))


@pytest.mark.parametrize("swap_gib", [0, 0.01], ids=["recompute", "swap"])
@pytest.mark.parametrize("options", [{}, {"top_k": 2, "depth": 3}], ids=["chain", "tree"])
def test_preemption_changes_no_token(
    target: Target, make_llm: Callable[..., LLM], swap_gib: float, options: dict[str, int]
) -> None:
    cache = {"num_blocks": 30, "swap_gib": swap_gib}
    llm = make_llm(target.heads[1], cache=cache, model={"max_model_len": 60}, options=options)
    outputs = llm.generate(target.prompts, PARAMS)
    assert tokens_of(outputs) == target.answers
    assert all(output.metrics.drafter_error is None for output in outputs)


@pytest.mark.parametrize("version", [1, 3])
def test_sampled_requests_repeat(target: Target, make_llm: Callable[..., LLM], version: int) -> None:
    llm = make_llm(target.heads[version])
    params = replace(PARAMS, temperature=1.0, seed=11)
    together = llm.generate(target.prompts[:4], params)
    assert tokens_of(llm.generate(target.prompts[:1], params)) == tokens_of(together[:1])
    assert all(output.metrics.drafter_error is None for output in together)


def test_the_authors_format_reads_the_same(target: Target, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """config.json of the layer itself, `midlayer`, a pickle."""
    config = head_config(3)
    layer = config.pop("transformer_layer_config")
    del config["speculators_model_type"]
    tensors = {name.replace("layers.0", "midlayer"): tensor for name, tensor in random_head(3).items()}
    folder = tmp_path / "original"
    folder.mkdir()
    layer |= {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(layer | config))
    torch.save(tensors, folder / "pytorch_model.bin")
    make_llm(folder, logged=True, num_tokens=3).generate(target.prompts[:2], PARAMS)
    theirs = rounds(tmp_path)
    (tmp_path / "log").unlink()
    make_llm(target.heads[3], logged=True, num_tokens=3).generate(target.prompts[:2], PARAMS)
    assert rounds(tmp_path) == theirs


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("hidden_size", 32, "reads states of 32 numbers, the target's have 64"), ("vocab_size", 96, "vocabulary of 96")],
)
def test_heads_of_another_model_are_refused(
    make_llm: Callable[..., LLM], tmp_path: Path, key: str, value: int, words: str
) -> None:
    config = head_config(1)
    config["transformer_layer_config"][key] = value
    with pytest.raises(ConfigError, match=words):
        make_llm(save_head(tmp_path, config, random_head(1)))


def test_weights_that_do_not_fit_their_config_are_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    tensors = random_head(1)
    del tensors["layers.0.mlp.up_proj.weight"]
    tensors["fc.weight"] = torch.zeros(HIDDEN, HIDDEN)
    with pytest.raises(ModelError, match=r"up_proj.*fc.weight has shape \[64, 64\], the config implies \[64, 128\]"):
        make_llm(save_head(tmp_path, head_config(1), tensors))


def test_layers_of_a_family_that_hides_them_are_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "gemma", tiny_config("gemma2", num_hidden_layers=LAYERS))
    head = save_head(tmp_path / "head", head_config(3), random_head(3))
    with pytest.raises(ConfigError, match="model family does not hand out"):
        make_llm(head, model={"path": str(tmp_path / "gemma")})


def test_a_folder_without_a_head_is_refused(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder of an EAGLE head"):
        make_llm(tmp_path)


def test_who_gives_no_head_is_told_where_one_lies() -> None:
    with pytest.raises(ConfigError, match=r"option 'path' is required: Folder .* examples/train_drafters/heads/eagle"):
        validate_options(EagleDrafter, "eagle", {})


def test_confidence_ends_chains(target: Target, make_llm: Callable[..., LLM]) -> None:
    outputs = make_llm(target.heads[1], options={"stop_below": 0.99}).generate(target.prompts, PARAMS)
    assert tokens_of(outputs) == target.answers
    assert sum(output.metrics.num_drafted for output in outputs) < len(outputs) * NUM_TOKENS


@pytest.mark.parametrize("version", [1, 3])
def test_hidden_states_of_captured_steps_are_those_of_the_oracle(
    target: Target, make_llm: Callable[..., LLM], tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the null device, whose graphs repeat what was recorded: the last states, and those between layers."""
    replays: list[int] = []
    run = GraphForward.run
    monkeypatch.setattr(
        GraphForward, "run", lambda self, *args: (run(self, *args), replays.append(self.num_replays))[0]
    )
    executor = {"name": "gpu", "device": "null", "null_order": "late", "cuda_graphs": [2, 4]}
    sections = {"executor": executor, "attention": CAPTURABLE, "scheduler": {"max_num_seqs": 4}}
    llm = make_llm(target.heads[version], logged=True, num_tokens=3, model={"operators": None}, **sections)
    assert tokens_of(llm.generate(target.prompts[:3], PARAMS)) == target.answers[:3]
    oracle = Oracle(target.model, version, random_head(version))
    seen = rounds(tmp_path)
    assert replays[-1] > len(replays) // 2
    for known, drafted, _, _ in seen[::4]:
        assert drafted == oracle.chain(known, len(drafted))
