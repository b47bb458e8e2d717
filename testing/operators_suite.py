"""The conformance suite of operator sets. A third party's test is a subclass::

    from dovetail.testing import OperatorsSuite

    class TestMyOperators(OperatorsSuite):
        plugin = MyOperators

Dtypes that `check` refuses are skipped, with its reason; in the others every operator must do what
`dovetail.contracts.operators` says. The oracle computes in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from dovetail.contracts.needs import reasons_against
from dovetail.contracts.operators import (
    AcceptsChains,
    AddsLowRank,
    AddsNarrowLowRank,
    DrawsTokens,
    MultipliesGroups,
    Operators,
    OperatorsNeed,
)
from dovetail.contracts.plugin import Environment
from dovetail.testing.chain_cases import Chains, random_chains
from dovetail.testing.low_rank_cases import LowRankCase, random_low_rank
from dovetail.testing.suite import PluginSuite

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5
SHAPES = ((0, 16), (1, 576), (3, 37), (5, 8), (2, 4096), (97, 579))
"""(rows, size): none, one, sizes that no vector divides, and more than one thread would take."""

_MIXED = (2, -1, 0, 1, 1, 0, -1, 2, 3)
LOW_RANK = {
    "no row": random_low_rank([], 64, [64], [4], 4),
    "one row": random_low_rank([1], 576, [576], [8, 8], 8),
    "no adapter": random_low_rank([-1, -1], 64, [64], [4], 4),
    "three parts": random_low_rank(_MIXED, 37, [40, 7, 7], [5, 1, 0, 3], 5),
    "one slot": random_low_rank([0] * 11, 579, [130], [16], 16),
    "many rows": random_low_rank([i * i % 7 - 1 for i in range(70)], 128, [96, 200], [12, 16, 2, 7, 16, 9], 16),
}
"""Rows of no slot, of one and of several."""
NARROW = (torch.bfloat16, torch.float16)
"""dtypes of adapters that `AddsNarrowLowRank` may take."""

Extra = TypeVar("Extra", bound=Operators)


class OperatorsSuite(PluginSuite):
    """Tests of every operator set. A plugin author sets `plugin`, and other attributes where they differ."""

    kind: ClassVar[str] = "operators"
    plugin: ClassVar[type[Operators]]
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    ulps: ClassVar[float] = 8
    """How far float32 and float64 results may be from exact ones, in units of the dtype's relative precision. Narrower
    dtypes are computed in float32, so that only the roundings that the contract names count."""

    # --- hooks and helpers ---------------------------------------------------------------------------------

    @pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        """Each dtype that the set serves here."""
        dtype: torch.dtype = request.param
        self.require(dtypes=str(dtype).removeprefix("torch."))
        if reasons := self.check(str(dtype).removeprefix("torch.")):
            pytest.skip(f"{self.plugin.__name__}: {' '.join(reasons)}")
        return dtype

    @pytest.fixture
    def operators(self, dtype: torch.dtype) -> Operators:
        """The set, made as the host makes it."""
        return self._create()

    def _create(self) -> Operators:
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)))

    def check(self, dtype: str, device_type: str | None = None) -> list[str]:
        """Returns the set's reasons against a need on this machine."""
        device_type = device_type or self.device.split(":")[0]
        environment = Environment(device_type=device_type, num_cpus=2, memory_bytes=2**34)
        options = self.plugin.Options.model_validate(dict(self.options))
        return reasons_against(self.plugin, OperatorsNeed(device_type, dtype), options, environment)

    def random(self, *shape: int, dtype: torch.dtype, scale: float = 2.0) -> torch.Tensor:
        """Normal numbers, the same for the same shape."""
        generator = torch.Generator().manual_seed(sum(shape))
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(self.device, dtype)

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor, roundings: int, scale: Any = 0.0) -> None:
        """Within `roundings` roundings of `expected` (float64), each relative to it or to `scale`, the larger one."""
        precision = torch.finfo(actual.dtype).eps
        is_narrow = actual.dtype in (torch.float16, torch.bfloat16)
        # Rounding is off by half a unit at most, and by a little more where float32 was close to a tie.
        units = 0.505 * roundings if is_narrow else max(self.ulps, roundings)
        magnitude = expected.abs().maximum(torch.as_tensor(scale, dtype=torch.float64, device=expected.device))
        # What is too small for the dtype's full precision is off by a fixed amount.
        bound = units * (precision * magnitude + torch.finfo(actual.dtype).tiny)
        wrong = (actual.double() - expected).abs() > bound
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.numel()} elements are further off than {units} units of the last place"
        )

    # --- operators -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", SHAPES)
    def test_rms_norm(self, operators: Operators, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        x, weight = self.random(*shape, dtype=dtype), self.random(shape[1], dtype=dtype)
        y = operators.rms_norm(x, weight, EPS)
        assert y.dtype == dtype
        assert y.is_contiguous()
        self.assert_close(y, rms_norm(x, weight), roundings=1)
        assert torch.equal(x, self.random(*shape, dtype=dtype)), "x is not given up"

    def test_rms_norm_of_nothing_and_of_small_numbers(self, operators: Operators, dtype: torch.dtype) -> None:
        """Where epsilon counts: it is inside the root, and zeros stay zeros."""
        x, weight = self.random(4, 37, dtype=dtype, scale=1e-3), self.random(37, dtype=dtype)
        x[1] = 0
        self.assert_close(operators.rms_norm(x, weight, EPS), rms_norm(x, weight), roundings=1)

    def test_rms_norm_with_float32_weights(self, operators: Operators, dtype: torch.dtype) -> None:
        if dtype == torch.float64:
            pytest.skip("float32 is not the wider dtype")
        x, weight = self.random(3, 37, dtype=dtype), self.random(37, dtype=torch.float32)
        y = operators.rms_norm(x, weight, EPS)
        assert y.dtype == dtype
        self.assert_close(y, rms_norm(x, weight), roundings=1)

    def test_rms_norm_of_heads_in_fused_rows(self, operators: Operators, dtype: torch.dtype) -> None:
        rows, weight = self.random(5, 6, 40, dtype=dtype), self.random(40, dtype=dtype)
        for heads in (rows[:, 1:4], rows[:1, 5:], rows.transpose(0, 1)):
            y = operators.rms_norm(heads, weight, EPS)
            assert y.is_contiguous()
            self.assert_close(y, rms_norm(heads, weight), roundings=1)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_add_rms_norm(self, operators: Operators, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        x, residual = self.random(*shape, dtype=dtype), self.random(*shape, dtype=dtype, scale=3.0).flip(0)
        weight = self.random(shape[1], dtype=dtype)
        expected = x + residual
        normed, total = operators.add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(total, expected), "one addition has one right rounding"
        self.assert_close(normed, rms_norm(expected, weight), roundings=1)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_silu_mul(self, operators: Operators, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        rows, size = shape
        gate_up = self.random(rows, 2 * size, dtype=dtype, scale=5.0)
        before = gate_up.clone()
        y = operators.silu_mul(gate_up)
        gate, up = gate_up.double().chunk(2, dim=-1)
        assert (y.dtype, y.shape, y.is_contiguous()) == (dtype, (rows, size), True)
        self.assert_close(y, gate / (1 + (-gate).exp()) * up, roundings=2)
        assert torch.equal(gate_up, before), "gate_up is not given up"

    def test_silu_mul_far_from_zero(self, operators: Operators, dtype: torch.dtype) -> None:
        gate = torch.tensor([[-1e4, -100.0, -30.0, 30.0, 100.0, 1e4, float("nan")]], device=self.device, dtype=dtype)
        y = operators.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))[0].double()
        assert y[:3].abs().max() < 1e-11
        torch.testing.assert_close(y[3:6], gate[0, 3:6].double(), rtol=1e-12, atol=0.0)
        assert y[6].isnan()

    @pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (24, 10), (80, 32), (2, 2)])
    @pytest.mark.parametrize("tokens", [0, 1, 7, 300])
    def test_rotate(
        self, operators: Operators, dtype: torch.dtype, tokens: int, head_size: int, rotary_size: int
    ) -> None:
        rows = self.random(tokens, 5, head_size, dtype=dtype)
        # As rotary tables hand them over: side by side.
        cos, sin = self.random(tokens, 2, 1, rotary_size, dtype=dtype, scale=0.5).unbind(1)
        given = [tensor.clone() for tensor in (rows, cos, sin)]
        y = operators.rotate(rows[:, :3], cos, sin)
        expected, scale = rotate(given[0][:, :3], cos, sin)
        assert (y.dtype, y.shape) == (dtype, expected.shape)
        self.assert_close(y, expected, roundings=2, scale=scale)
        assert torch.equal(y[..., rotary_size:], given[0][:, :3, rotary_size:])
        assert torch.equal(rows[:, 3:], given[0][:, 3:]), "elements outside the heads were changed"
        assert torch.equal(cos, given[1])
        assert torch.equal(sin, given[2])

    @pytest.mark.parametrize("width", [6, 0])
    @pytest.mark.parametrize("tokens", [0, 1, 40])
    def test_take_rows(self, operators: Operators, dtype: torch.dtype, tokens: int, width: int) -> None:
        table = self.random(9, 2, 1, width, dtype=dtype)
        ids = torch.arange(tokens, device=self.device) % 7
        assert torch.equal(operators.take_rows(table, ids), table[ids])

    # --- what some sets have besides -----------------------------------------------------------------------

    def extra(self, kind: type[Extra]) -> Extra:
        """The set, where it is a `kind`; otherwise the test is skipped."""
        name, reasons = self.plugin.__name__, [self.check(str(dtype).split(".")[1]) for dtype in DTYPES]
        if all(reasons):
            pytest.skip(f"{name}: {' '.join(reasons[0])}")
        operators = self._create()
        if not isinstance(operators, kind):
            pytest.skip(f"{name} is no {kind.__name__}")
        return operators

    @pytest.fixture
    def chain_operators(self) -> AcceptsChains:
        """The set, where it accepts chains."""
        return self.extra(AcceptsChains)  # type: ignore[type-abstract]

    @pytest.fixture
    def drawing_operators(self) -> DrawsTokens:
        """The set, where it draws tokens."""
        return self.extra(DrawsTokens)  # type: ignore[type-abstract]

    @pytest.fixture
    def grouping_operators(self) -> MultipliesGroups:
        """The set, where it multiplies groups."""
        return self.extra(MultipliesGroups)  # type: ignore[type-abstract]

    @pytest.fixture
    def adding_operators(self, operators: Operators) -> AddsLowRank:
        """The set, where it adds low-rank adapters."""
        if not isinstance(operators, AddsLowRank):
            pytest.skip(f"{self.plugin.__name__} is no AddsLowRank")
        return operators

    @pytest.fixture
    def narrow_operators(self, operators: Operators) -> AddsNarrowLowRank:
        """The set, where it adds adapters that are narrower than the rows."""
        if not isinstance(operators, AddsNarrowLowRank):
            pytest.skip(f"{self.plugin.__name__} is no AddsNarrowLowRank")
        return operators

    @pytest.mark.parametrize("vocab_size", [7, 1000, 3001])
    def test_draw(self, drawing_operators: DrawsTokens, vocab_size: int) -> None:
        """With and without each parameter, among ties and masked tokens: the uniform falls into the middle of a token's
        mass, so that no rounding decides."""
        rows = 24
        generator = torch.Generator().manual_seed(vocab_size)
        logits = torch.randn(rows, vocab_size, generator=generator) * 3
        logits[::3] = logits[::3].round()  # ties
        logits[1::4, ::2] = -torch.inf
        temperature = torch.tensor([1.0, 0.7, 1.5, 0.3]).repeat(rows // 4)
        min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 1.0, 0.02]).repeat(rows // 6)
        top_k = torch.tensor([vocab_size, 1, 3, vocab_size, 5, vocab_size, 2, vocab_size]).repeat(rows // 8)
        top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.01], dtype=torch.float64).repeat(rows // 6)
        columns = temperature, min_p, top_k, top_p
        weights = torch.stack([kept_weights(*row) for row in zip(logits, *columns, strict=True)])
        expected = torch.multinomial(weights, 1, generator=generator)
        middle = (weights.cumsum(1) - weights / 2).gather(1, expected)[:, 0] / weights.sum(1)
        given = [tensor.to(self.device) for tensor in (logits, *columns, middle)]
        tokens = drawing_operators.draw(*(tensor.clone() for tensor in given))
        assert (tokens.dtype, tokens.tolist()) == (torch.int64, expected[:, 0].tolist())

    def test_draw_at_the_ends(self, drawing_operators: DrawsTokens) -> None:
        """The lowest and highest numbers that can be drawn fall on the first and the last token that is kept."""
        logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf, 2.0, -torch.inf]] * 3)
        ones, ends = torch.ones(3), torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
        columns = ones, torch.zeros(3), torch.full((3,), 6), torch.ones(3, dtype=torch.float64), ends
        tokens = drawing_operators.draw(*(tensor.to(self.device) for tensor in (logits, *columns)))
        assert tokens.tolist() == [1, 2, 4]

    @pytest.mark.parametrize("number", [float("nan"), -float("inf")])
    def test_draw_ends_for_what_cannot_be_drawn_from(self, drawing_operators: DrawsTokens, number: float) -> None:
        one = torch.ones(1)
        columns = one, one * 0, torch.tensor([3]), one.double() / 2, one.double() / 2
        tokens = drawing_operators.draw(*(tensor.to(self.device) for tensor in (torch.full((1, 50), number), *columns)))
        assert 0 <= int(tokens) < 50

    @pytest.mark.parametrize("counts", [[3, 0, 1, 20], [0, 0, 0, 5], [70, 70, 0, 1], [0, 0]])
    def test_grouped_linear(self, grouping_operators: MultipliesGroups, counts: list[int]) -> None:
        """Groups of no row, of one and of many, each with its own matrix."""
        for dtype in DTYPES:
            if self.check(str(dtype).removeprefix("torch.")):
                continue
            x, weight = self.random(sum(counts), 48, dtype=dtype), self.random(len(counts), 40, 48, dtype=dtype)
            starts = torch.tensor([0, *counts], device=self.device).cumsum(0).int()
            y = grouping_operators.grouped_linear(x, weight, starts)
            parts = [part.double() @ weight[i].double().T for i, part in enumerate(torch.split(x, counts))]
            scale = [part.double().abs() @ weight[i].double().abs().T for i, part in enumerate(torch.split(x, counts))]
            assert (y.dtype, y.shape) == (dtype, (sum(counts), 40))
            self.assert_close(y, torch.cat(parts), roundings=1, scale=torch.cat(scale))

    @pytest.mark.parametrize("vocab_size", [5, 300, 9001])
    def test_accept_chains(self, chain_operators: AcceptsChains, vocab_size: int) -> None:
        """Draft tokens from distributions near the target's, far from it and disjoint from it, in chains of different
        lengths."""
        chains = random_chains([3, 0, 1, 6, 2, 17, 5], vocab_size, self.device)
        given = [tensor.clone() for tensor in chains.arguments]
        accepted, tokens = chain_operators.accept_chains(*chains.arguments)
        assert (accepted.dtype, tokens.dtype) == (torch.int64, torch.int64)
        assert list(zip(accepted.tolist(), tokens.tolist(), strict=True)) == chains.expected()
        assert all(map(torch.equal, chains.arguments, given)), "nothing is given up"

    def test_accept_no_chains(self, chain_operators: AcceptsChains) -> None:
        accepted, tokens = chain_operators.accept_chains(*random_chains([], 7, self.device).arguments)
        assert (accepted.tolist(), tokens.tolist()) == ([], [])

    def test_accept_chains_draws_nothing_of_weight_0(self, chain_operators: AcceptsChains) -> None:
        """At both ends of the uniforms, behind refused nodes and behind whole chains."""
        p, q = [0.0, 0.5, 0.0, 0.5, 0.0], [0.5, 0.25, 0.0, 0.25, 0.0]
        first_last = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
        for token, expected in ((0, [(0, 1), (0, 3)]), (1, [(1, 1), (1, 3)])):
            chains = Chains(
                target=torch.tensor([p] * 4, device=self.device),
                draft=torch.tensor([q] * 2, device=self.device),
                token_ids=torch.tensor([token] * 2, device=self.device),
                starts=torch.tensor([0, 1, 2], dtype=torch.int32, device=self.device),
                accept_uniforms=torch.full((2,), 0.5, dtype=torch.float64, device=self.device),
                recover_uniforms=first_last.repeat_interleave(2).to(self.device),
            )
            assert chains.expected() == expected
            accepted, tokens = chain_operators.accept_chains(*chains.arguments)
            assert list(zip(accepted.tolist(), tokens.tolist(), strict=True)) == expected

    def test_accept_chains_draws_from_the_target_where_nothing_is_left(self, chain_operators: AcceptsChains) -> None:
        """What rounding can do: a draft that has at least the target's probability everywhere, and is refused."""
        chains = random_chains([1] * 8, 50, self.device)
        draft, uniforms = chains.target[::2] * 1.25, torch.full_like(chains.accept_uniforms, 0.9)
        chains = replace(chains, draft=draft, accept_uniforms=uniforms)
        accepted, tokens = chain_operators.accept_chains(*chains.arguments)
        assert accepted.tolist() == [0] * 8
        assert list(zip(accepted.tolist(), tokens.tolist(), strict=True)) == chains.expected()

    def test_accept_chains_ends_for_what_is_no_distribution(self, chain_operators: AcceptsChains) -> None:
        """Rows of nothing but 0, as the host has them for requests that fail, and NaN."""
        for number in (0.0, float("nan")):
            chains = random_chains([2], 50, self.device)
            chains = replace(chains, target=torch.full_like(chains.target, number))
            _, tokens = chain_operators.accept_chains(*chains.arguments)
            assert 0 <= int(tokens) < 50

    def _add(self, operators: AddsLowRank, case: LowRankCase) -> torch.Tensor:
        y, *others = case.arguments
        operators.add_low_rank(y, *others)
        return y

    @pytest.mark.parametrize("case", LOW_RANK.values(), ids=LOW_RANK.keys())
    def test_add_low_rank(self, adding_operators: AddsLowRank, dtype: torch.dtype, case: LowRankCase) -> None:
        """Layers of one part and of several, ranks below the highest, rows of all slots in any order, and rows without
        an adapter."""
        case = case.to(dtype, self.device)
        given = [tensor.clone() for tensor in case.arguments[1:]]
        y = self._add(adding_operators, case)
        expected, scale = case.expected()
        self.assert_close(y, expected, roundings=1, scale=scale)
        bare = case.slots == -1
        assert torch.equal(y[bare], case.y[bare]), "rows without an adapter were changed"
        assert all(map(torch.equal, case.arguments[1:], given)), "nothing but y is changed"

    @pytest.mark.parametrize("narrow", NARROW, ids=lambda dtype: str(dtype).removeprefix("torch."))
    @pytest.mark.parametrize("case", ["three parts", "one slot", "many rows"])
    def test_add_low_rank_of_narrower_adapters(
        self, narrow_operators: AddsNarrowLowRank, dtype: torch.dtype, narrow: torch.dtype, case: str
    ) -> None:
        """They give what the same numbers do in the rows' dtype; rows are not rounded to theirs, nor are results."""
        if narrow.itemsize >= dtype.itemsize:
            pytest.skip("is not narrower than the rows")
        given = LOW_RANK[case].to(dtype, self.device)
        given = replace(given, a=given.a.to(narrow), b=given.b.to(narrow))
        y = self._add(narrow_operators, given)
        expected, scale = given.expected()
        self.assert_close(y, expected, roundings=1, scale=scale)
        alone = self._add(narrow_operators, given.only(slice(1, 2)))
        assert torch.equal(alone, y[1:2]), "rows depend on the batch"

    @pytest.mark.parametrize("narrow", NARROW, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_numbers_of_narrower_adapters_are_exact(
        self, narrow_operators: AddsNarrowLowRank, dtype: torch.dtype, narrow: torch.dtype
    ) -> None:
        """Each of them, subnormal ones of float16 too."""
        if narrow.itemsize >= dtype.itemsize:
            pytest.skip("is not narrower than the rows")
        numbers = torch.arange(-(2**15), 2**15).short().view(narrow)
        numbers = numbers[numbers.isfinite() & (numbers.double().abs() >= torch.finfo(torch.float32).tiny)]
        b = numbers.to(self.device).view(1, 1, -1)
        y = torch.zeros(2, b.numel(), device=self.device, dtype=dtype)
        starts, ranks, slots = ([0, b.numel()], [1], [0, 0])
        places = (torch.tensor(place, dtype=torch.int32, device=self.device) for place in (starts, ranks, slots))
        narrow_operators.add_low_rank(y, torch.ones_like(y[:, :1]), torch.ones_like(b[:, :, :1])[None], b, *places)
        assert torch.equal(y, b[0].to(dtype).expand(2, -1))

    def test_add_low_rank_to_rows_of_wider_ones(self, adding_operators: AddsLowRank, dtype: torch.dtype) -> None:
        case = LOW_RANK["three parts"].to(dtype, self.device)
        wide_y, wide_x = (self.random(len(case.y), 700, dtype=dtype) for _ in range(2))
        before = wide_y.clone()
        y, x = wide_y[:, 3 : 3 + case.y.shape[1]], wide_x[:, 5 : 5 + case.x.shape[1]]
        case = replace(case, y=y.clone(), x=x)
        adding_operators.add_low_rank(y, x, *case.arguments[2:])
        expected, scale = case.expected()
        self.assert_close(y, expected, roundings=1, scale=scale)
        before[:, 3 : 3 + case.y.shape[1]] = y
        assert torch.equal(wide_y, before), "elements outside the rows were changed"

    def test_add_low_rank_rounds_once(self, adding_operators: AddsLowRank, dtype: torch.dtype) -> None:
        """Inner products that the dtype does not hold: what is left beside y is exact."""
        x = torch.ones(3, 40).to(self.device, dtype)
        a = torch.arange(40.0).repeat(1, 1, 1, 1).to(self.device, dtype) % 31
        inner = int(a.double().sum())  # 501, which bfloat16 does not hold
        y = torch.full((3, 24), -float(inner - 1)).to(self.device, dtype)
        left = inner + float(y[0, 0])
        ones, starts = torch.ones(1, 1, 24).to(self.device, dtype), torch.tensor([0, 24], dtype=torch.int32)
        ranks, slots = torch.ones(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        places = (tensor.to(self.device) for tensor in (starts, ranks, slots))
        adding_operators.add_low_rank(y, x, a, ones, *places)
        assert torch.equal(y.double(), torch.full_like(y, left).double())

    def test_adapters_of_other_slots_do_not_matter(self, adding_operators: AddsLowRank, dtype: torch.dtype) -> None:
        """Whatever they hold."""
        case = LOW_RANK["three parts"].to(dtype, self.device)
        case = replace(case, slots=torch.where(case.slots == 1, -1, case.slots))
        expected = self._add(adding_operators, case)
        case.a[1], case.b[1] = torch.nan, torch.inf
        assert torch.equal(self._add(adding_operators, case), expected)

    # --- promises ------------------------------------------------------------------------------------------

    def test_rows_do_not_depend_on_the_batch(self, operators: Operators, dtype: torch.dtype) -> None:
        """One row alone, among few and among many gives the same bits."""
        rows, size = 130, 579
        x, weight = self.random(rows, size, dtype=dtype), self.random(size, dtype=dtype)
        gate_up = self.random(rows, 2 * size, dtype=dtype)
        angles = self.random(rows, 2, 1, 64, dtype=dtype)
        heads = self.random(rows, 9, 64, dtype=dtype)

        def run(part: slice) -> list[torch.Tensor]:
            cos, sin = angles[part].unbind(1)
            return [
                operators.rms_norm(x[part], weight, EPS),
                *operators.add_rms_norm(x[part].clone(), x[part].flip(1), weight, EPS),
                operators.silu_mul(gate_up[part]),
                operators.rotate(heads[part].clone(), cos, sin),
            ]

        everything = run(slice(0, rows))
        for part in (slice(0, 1), slice(17, 18), slice(40, 47), slice(129, 130)):
            for alone, among in zip(run(part), everything, strict=True):
                assert torch.equal(alone, among[part])

    @pytest.mark.parametrize("case", ["three parts", "one slot", "many rows"])
    def test_adapted_rows_do_not_depend_on_the_batch(
        self, adding_operators: AddsLowRank, dtype: torch.dtype, case: str
    ) -> None:
        together = LOW_RANK[case].to(dtype, self.device)
        expected = self._add(adding_operators, together)
        rows = len(together.y)
        for part in (slice(0, 1), slice(1, 4), slice(rows - 6, rows - 1), slice(rows - 1, rows)):
            assert torch.equal(self._add(adding_operators, together.only(part)), expected[part])

    def test_chains_do_not_depend_on_the_batch(self, chain_operators: AcceptsChains) -> None:
        sizes = [4, 1, 0, 6, 3]
        chains = random_chains(sizes, 9001, self.device)
        together = [result.tolist() for result in chain_operators.accept_chains(*chains.arguments)]
        alone = [chain_operators.accept_chains(*chains.only(r).arguments) for r in range(len(sizes))]
        assert together == [[int(result[i]) for result in alone] for i in range(2)]

    def test_results_stay_as_they_are(self, operators: Operators, dtype: torch.dtype) -> None:
        """They are new: the next call overwrites none of them."""

        def run(seed: int, rows: int) -> list[torch.Tensor]:
            x, residual, weight = (self.random(rows, 64, dtype=dtype).roll(seed + i) for i in range(3))
            cos, sin = self.random(rows, 2, 1, 16, dtype=dtype).roll(seed).unbind(1)
            return [
                operators.rms_norm(x, weight[0], EPS),
                *operators.add_rms_norm(x.clone(), residual, weight[0], EPS),
                operators.silu_mul(x),
                operators.rotate(x.view(rows, 4, 16).clone(), cos, sin),
                operators.take_rows(x, torch.arange(rows, device=self.device)),
            ]

        first = run(0, 9)
        kept = [result.clone() for result in first]
        for seed, rows in ((1, 9), (2, 3), (3, 40)):
            run(seed, rows)
        assert all(map(torch.equal, first, kept)), "a later call changed what an earlier one returned"

    # --- selection -----------------------------------------------------------------------------------------

    def test_check_gives_reasons_in_sentences(self) -> None:
        for dtype in (*(str(dtype).removeprefix("torch.") for dtype in DTYPES), "int4"):
            assert all(reason.strip() for reason in self.check(dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The contract's formula in float64."""
    wide = x.double()
    return wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def kept_weights(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The contract's words in float64, of one row: the weights of what is kept, and 0."""
    wide = logits.double()
    weights = ((wide - wide.max()) / temperature.double()).exp()
    weights[weights < min_p] = 0
    weights[weights < weights.sort(descending=True).values[int(top_k) - 1]] = 0
    ordered = weights.sort(descending=True).values
    # The fewest that hold their share: those before which less than it was held.
    before = ordered.cumsum(0) - ordered
    fewest = int((before < top_p * weights.sum() * (1 - 1e-12)).sum())
    weights[weights < ordered[fewest - 1]] = 0
    return weights


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract's formula in float64, and the sum of the magnitudes of what is added."""
    size = cos.shape[-1]
    turned, rest = heads[..., :size].double(), heads[..., size:].double()
    own, other = turned * cos.double(), turned.roll(size // 2, dims=-1) * sin.double()
    return torch.cat((own + other, rest), dim=-1), torch.cat((own.abs() + other.abs(), rest.abs()), dim=-1)


__all__ = ["OperatorsSuite"]
