"""What a step launches: its rows cut into tiles and items, once for each kind of layer, in buffers that stay where they
are. Keys and values and latent vectors are planned alike; what is launched is a `TileLauncher`'s."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from dovetail.attention_backends.paged_triton.buffers import Arrays, StepArrays
from dovetail.attention_backends.paged_triton.configs import KernelConfig
from dovetail.attention_backends.paged_triton.plan import (
    MIN_SPLIT,
    Items,
    Rows,
    create_items,
    create_tiles,
    max_tiles,
    split_rows,
    token_records,
    written_ends,
)
from dovetail.attention_backends.paged_triton.sharing import find_groups, share
from dovetail.attention_backends.shared_prefix import SharedPrefix
from dovetail.contracts.attention import AttentionBatch, AttentionLayer, AttentionSetup
from dovetail.contracts.errors import ConfigError

MAX_SHORT = 32
"""Query tokens up to which a request counts as decoding or verifying."""
MAX_TREE = 256
"""Tokens of the largest tree; sizes the buffer of masks."""
_DRAFT_ROOM = 256
"""Tokens that drafts may reach beyond `max_model_len`."""
_SHARING_TOKENS = 4
"""Query tokens for each request at most (`max_num_seqs` of them) that read shared keys together; sizes the buffer of
their parts."""
_ITEMS_PER_PROCESSOR = {"short": 4, "long": 2}
"""Programs of an item's tiles that each multiprocessor should find, so that all end at about the same time."""


@dataclass(frozen=True)
class Kind:
    """Layers whose tiles and key ranges are the same."""

    group: int
    """Query heads of a tile: those of one key head, or some of those that read one latent vector."""
    num_groups: int
    """Programs of an item."""
    window: int | None

    @classmethod
    def of(cls, layer: AttentionLayer) -> Kind:
        """Of a layer with keys and values."""
        return cls(layer.num_heads // layer.num_kv_heads, layer.num_kv_heads, layer.window)


class TileLauncher(Protocol):
    """The kernels for the layers of one setup."""

    head_pad: int
    """Elements of a row of a part."""

    def kind(self, layer: AttentionLayer) -> Kind:
        """How the layer's heads form tiles."""

    def config(self, kind: str, rows: int, group: int) -> KernelConfig:
        """The stored config for tiles of `rows` rows; a tile holds all `group` query heads at least."""

    def can_share(self, layer: AttentionLayer) -> bool:
        """Whether requests may read the keys of a common prefix together."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        arrays: Arrays,
        config: KernelConfig,
        num_items: int,
    ) -> None:
        """All items of one launch; items of several parts leave them in `arrays.partials`."""

    def merge(
        self,
        layer: AttentionLayer,
        output: torch.Tensor,
        merges: torch.Tensor,
        arrays: Arrays,
        most_tokens: int,
        num_merges: int,
    ) -> None:
        """Puts the parts of tiles together whose keys were cut. `most_tokens`: of a tile, at most."""


class Pass(ABC):
    """The short or the long rows of one kind of layers in a step."""

    @abstractmethod
    def attend(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """Fills the rows of `output` that are its own; new keys and values are in the pages already."""


@dataclass(frozen=True)
class TilePass(Pass):
    """Rows that go through the kernels of this package."""

    launcher: TileLauncher
    config: KernelConfig
    most_tokens: int
    """Of a tile: what it holds, or the longest query of the step where that is shorter."""
    num_items: int
    """In a step for a graph a bound that does not depend on lengths; some have nothing to do then."""
    num_merges: int
    """Likewise. 0: no launch, since no tile is in parts; in a step for a graph, since none can be in any."""
    arrays: Arrays
    merges: torch.Tensor

    def attend(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """One launch, and one more where tiles are in parts."""
        self.launcher.attend(layer, query, kv_cache, output, self.arrays, self.config, self.num_items)
        if self.num_merges:
            self.launcher.merge(layer, output, self.merges, self.arrays, self.most_tokens, self.num_merges)


@dataclass(frozen=True)
class Step:
    """What all passes of a step are planned from."""

    batch: AttentionBatch
    table_width: int
    key_ends: np.ndarray
    """As `written_ends` has them."""
    groups: list[tuple[SharedPrefix, int]]
    """As `find_groups` has them: of short rows, for layers that see all keys."""


class Passes:
    """The plan of a step, and its launches.

    A captured launch serves every later step with as many requests, as many tokens and the same
    `AttentionBatch.max_query_len` (which may be an upper bound), whatever lengths, pages and trees.
    """

    def __init__(self, setup: AttentionSetup, launcher: TileLauncher, num_processors: int):
        self.setup = setup
        self._launcher = launcher
        self._kind_of = {layer.layer_id: launcher.kind(layer) for layer in setup.layers}
        self._kinds = tuple(dict.fromkeys(self._kind_of.values()))
        num_groups = max(kind.num_groups for kind in self._kinds)
        self._most_extra = {
            name: max(1, count * num_processors // num_groups) for name, count in _ITEMS_PER_PROCESSOR.items()
        }
        device = torch.device(setup.device)
        self._table_room = -(-(setup.max_model_len + _DRAFT_ROOM) // setup.block_size) * setup.max_num_seqs
        self._arrays = self._create_arrays(device)
        self._passes: dict[Kind, list[Pass]] = {}
        self._compiled: set[int] = set()
        """Layers of which every kernel was launched."""
        with torch.inference_mode(False):
            self._no_items = torch.zeros(1, 8, dtype=torch.int32, device=device)
            self._partials, self._sums = self._create_partials(device)

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [most tokens, 4]: slot, position, place in a tree of each query token, as kernels.py describes it."""
        return self._arrays.device["tokens"]

    def plan(self, batch: AttentionBatch) -> None:
        """Cuts the step into tiles and items, once for each kind of layer, and sends them to the device."""
        self._passes.clear()
        num_tokens = int(batch.query_start[-1])
        if num_tokens == 0:
            return
        arrays = self._arrays
        arrays.begin()
        self._check_sizes(batch)
        num_bytes = token_records(batch, arrays.host("tokens"), arrays.host("tree"))
        arrays.send("tokens", num_tokens)
        arrays.send("tree", num_bytes)
        width = -(-batch.max_seq_len // self.setup.block_size)
        size = len(batch.seq_lens) * width
        arrays.host("table")[:size] = batch.block_table[:, :width].reshape(-1)
        arrays.send("table", size)
        # All rows go through one kernel where their bits must not depend on which others are computed with them.
        short, long = split_rows(batch, num_tokens if self.setup.batch_invariant else MAX_SHORT)
        step = Step(batch, width, written_ends(batch, self.setup.block_size), self._find_groups(batch, short))
        for index, kind in enumerate(self._kinds):
            passes: list[Pass] = []
            if not short.is_empty:
                passes.append(self._plan_pass(step, short, kind, f"short{index}"))
            if not long.is_empty:
                passes.append(self.plan_long(step, long, kind, f"long{index}"))
            self._passes[kind] = passes
        arrays.end()

    def attend(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """Launches what was planned; new tokens are in the pages already. Fills `output`."""
        if len(query) == 0:
            return
        if layer.layer_id not in self._compiled:
            self._compile(layer, query, kv_cache, output)
        for rows in self._passes[self._kind_of[layer.layer_id]]:
            rows.attend(layer, query, kv_cache, output)

    def _compile(
        self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Launches each kernel that a later step can need, with nothing to do: the first launch compiles, which must
        not wait for the first request that is as long, or shares a prefix."""
        self._compiled.add(layer.layer_id)
        kind = self._kind_of[layer.layer_id]
        arrays = replace(self._launch_arrays(f"short{self._kinds.index(kind)}"), items=self._no_items)
        configs = self.configs(kind)
        for config in configs:
            self._launcher.attend(layer, query, kv_cache, output, arrays, config, 1)
        if any(self._can_cut(kind, config.block_m // kind.group) for config in configs):
            self._launcher.merge(layer, output, self._no_items, arrays, 1, 1)

    def plan_long(self, step: Step, rows: Rows, kind: Kind, name: str) -> Pass:
        """How prompts and long chunks are attended to; a backend that has them computed otherwise overrides it."""
        return self._plan_pass(step, rows, kind, name)

    def _plan_pass(self, step: Step, rows: Rows, kind: Kind, name: str) -> Pass:
        batch, is_long = step.batch, name.startswith("long")
        groups = step.groups if not is_long and kind.window is None else []
        config = self._config(batch, kind, is_long=is_long, shares=bool(groups))
        tokens_per_tile = config.block_m // kind.group
        most_extra = self._most_extra["long" if is_long else "short"]
        tiles, sharing = create_tiles(batch, rows, tokens_per_tile, kind.window, step.key_ends), None
        if groups:
            members = self._arrays.host(f"members_{name}")
            tiles, sharing = share(tiles, groups, tokens_per_tile, most_extra // 2, members)
            if sharing is not None:
                self._arrays.send(f"members_{name}", int(sharing.tiles.count.sum()))
        found = create_items(
            batch, tiles, step.table_width, most_extra, kind.group, sharing, in_runs=self.setup.batch_invariant
        )
        num_items, num_merges = len(found.items), len(found.merges)
        if batch.is_for_graph:
            num_tiles = max_tiles(rows, tokens_per_tile)
            num_items, num_merges = num_tiles + most_extra, self._most_merges(kind, num_tiles, tokens_per_tile, name)
        self._send_items(found, name, num_items, num_merges)
        return TilePass(
            self._launcher,
            config,
            min(tokens_per_tile, batch.max_query_len),
            num_items,
            num_merges,
            self._launch_arrays(name),
            self._arrays.device[f"merges_{name}"],
        )

    def configs(self, kind: Kind) -> list[KernelConfig]:
        """The tile sizes that steps can have; a backend that has prompts computed otherwise overrides it."""
        group = kind.group
        if self.setup.batch_invariant:
            return [self._launcher.config("verify", MAX_SHORT * group, group)]
        found = [self._launcher.config("decode", group, group)]
        found += [self._launcher.config("verify", tokens * group, group) for tokens in range(2, MAX_SHORT + 1)]
        if self.setup.max_num_batched_tokens > MAX_SHORT:
            found.append(self._launcher.config("prefill", 0, group))
        return list(dict.fromkeys(found))

    def _config(self, batch: AttentionBatch, kind: Kind, *, is_long: bool, shares: bool) -> KernelConfig:
        """Tile sizes. Tiles over shared keys are large, except in graphs, which serve steps without any as well."""
        group = kind.group
        if is_long:
            return self._launcher.config("prefill", 0, group)
        if self.setup.batch_invariant or (shares and not batch.is_for_graph):
            return self._launcher.config("verify", MAX_SHORT * group, group)
        if batch.max_query_len == 1:
            return self._launcher.config("decode", group, group)
        return self._launcher.config("verify", min(batch.max_query_len, MAX_SHORT) * group, group)

    def _find_groups(self, batch: AttentionBatch, short: Rows) -> list[tuple[SharedPrefix, int]]:
        setup = self.setup
        if not any(self._launcher.can_share(layer) for layer in setup.layers):
            return []
        return find_groups(batch, short.requests, setup.block_size, _SHARING_TOKENS * setup.max_num_seqs)

    def _most_merges(self, kind: Kind, num_tiles: int, tokens_per_tile: int, name: str) -> int:
        """A bound that does not depend on lengths: a tile that shares keys is one of two parts at least."""
        if not self._can_cut(kind, tokens_per_tile):
            return 0
        if name.startswith("short") and kind.window is None and not self.setup.batch_invariant:
            return num_tiles
        return min(num_tiles, self._most_extra["short" if name.startswith("short") else "long"])

    def _send_items(self, found: Items, name: str, num_items: int, num_merges: int) -> None:
        """With rows of nothing behind the last, up to the sizes of the grids."""
        for array, rows, count in (("items", found.items, num_items), ("merges", found.merges, num_merges)):
            host = self._arrays.host(f"{array}_{name}")
            host[: len(rows)] = rows
            host[len(rows) : count] = 0
            self._arrays.send(f"{array}_{name}", count)

    def _can_cut(self, kind: Kind, tokens_per_tile: int) -> bool:
        """Whether a tile of some step without trees can see more keys than `create_items` leaves in one piece. Runs are
        cut at fixed positions, which the shortest window may lie across."""
        if self.setup.batch_invariant:
            return True
        most_keys = self.setup.max_model_len + _DRAFT_ROOM
        if kind.window is not None:
            most_keys = min(most_keys, kind.window - 1 + tokens_per_tile)
        return most_keys > MIN_SPLIT

    def _launch_arrays(self, name: str) -> Arrays:
        arrays = self._arrays.device
        nothing = arrays["tokens"]
        return Arrays(
            arrays["tokens"],
            arrays["table"],
            arrays["tree"],
            arrays[f"items_{name}"],
            nothing,
            nothing,
            self._partials,
            self._sums,
            arrays.get(f"members_{name}", nothing),
        )

    def _create_arrays(self, device: torch.device) -> StepArrays:
        setup = self.setup
        arrays = StepArrays(device)
        arrays.add("tokens", (setup.max_num_batched_tokens, 4))
        arrays.add("tree", (setup.max_num_batched_tokens * MAX_TREE,), np.uint8)
        arrays.add("table", (self._table_room,))
        for index, kind in enumerate(self._kinds):
            for name, most_tiles in (
                ("short", setup.max_num_batched_tokens),
                ("long", setup.max_num_batched_tokens // self._tokens_per_long_tile(kind) + setup.max_num_seqs),
            ):
                arrays.add(f"items_{name}{index}", (most_tiles + self._most_extra[name], 8))
                arrays.add(f"merges_{name}{index}", (most_tiles, 8))
            arrays.add(f"members_short{index}", (_SHARING_TOKENS * setup.max_num_seqs,))
        return arrays

    def _tokens_per_long_tile(self, kind: Kind) -> int:
        return self._launcher.config("prefill", 0, kind.group).block_m // kind.group

    def _create_partials(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for parts, which all layers share, since they run one after another. Of cut tiles there are at most
        two parts for each that they are more; of tiles that share keys one may be left in one piece, and one of the
        shared keys."""
        launcher, setup = self._launcher, self.setup
        rows = max(
            kind.num_groups
            * (
                2 * self._most_extra[name] * launcher.config(kind_name, MAX_SHORT * kind.group, kind.group).block_m
                + 2 * _SHARING_TOKENS * setup.max_num_seqs * kind.group
            )
            for kind in self._kinds
            for name, kind_name in (("short", "verify"), ("long", "prefill"))
        )
        partials = torch.empty(rows, launcher.head_pad, dtype=torch.float32, device=device)
        return partials, torch.empty(rows, 2, dtype=torch.float32, device=device)

    def _check_sizes(self, batch: AttentionBatch) -> None:
        """Buffers stay where they are, since graphs know their addresses: a step that is larger is refused."""
        setup = self.setup
        num_tokens, num_requests = int(batch.query_start[-1]), len(batch.seq_lens)
        largest_tree = max((len(mask) for mask in batch.tree_masks.values()), default=0)
        most_keys = setup.max_model_len + _DRAFT_ROOM
        for what, count, most in (
            ("query tokens", num_tokens, setup.max_num_batched_tokens),
            ("requests", num_requests, setup.max_num_seqs),
            ("keys in one request", batch.max_seq_len, most_keys),
            ("tokens in one tree", largest_tree, MAX_TREE),
        ):
            if count > most:
                raise ConfigError(f"paged_triton was set up for {most} {what}; this step has {count}.")
