"""What the codes are, what they cost, and a model that is held in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from dovetail_nf4.codes import TABLE, constants, packed_codes, rounded_constants, written_out
from dovetail_nf4.method import WRITTEN_OUT, NF4Linear, NF4Method
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import DovetailError
from dovetail.contracts.quantization import LinearShape, QuantizationNeed
from dovetail.testing.story_model import STORY, save_story_model


def test_the_table_divides_a_normal_distribution() -> None:
    """Quantiles at equal steps of probability, 7 below 0 and 8 above it, in units of the last (QLoRA, section 3)."""
    end = (1 - 1 / 32 + 1 - 1 / 30) / 2
    below = [-NormalDist().inv_cdf(end + (0.5 - end) * step / 7) for step in range(7)]
    above = [NormalDist().inv_cdf(end + (0.5 - end) * step / 8) for step in range(8)]
    expected = [*(-x / below[0] for x in below), 0.0, *(x / above[0] for x in reversed(above))]
    expected[:7] = [x / above[0] for x in below]
    assert pytest.approx(expected, abs=1e-6) == TABLE


def held(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    of_blocks = constants(*rounded_constants(weight, block_size))
    return written_out(packed_codes(weight, of_blocks), of_blocks, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([1e-6, 0.02, 1.0, 3e4]),
    block_size=st.sampled_from([2, 16, 64]),
    outlier=st.sampled_from([1.0, 40.0]),
)
def test_each_weight_is_the_nearest_of_16(seed: int, spread: float, block_size: int, outlier: float) -> None:
    """Against all 16, tried out. Where the constant was rounded down the block's largest weight is cut to it."""
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(seed)) * spread
    weight[1, 5] *= outlier
    of_blocks = constants(*rounded_constants(weight, block_size))
    numbers = torch.tensor(TABLE) * of_blocks.repeat_interleave(block_size, dim=1)[:, :, None]
    best = (numbers - weight[:, :, None]).abs().amin(dim=2)
    error = (held(weight, block_size) - weight).abs()
    assert bool((error <= best * 1.0001 + 1e-7 * spread * outlier).all())


@pytest.mark.parametrize("spread", [1.0, 0.02])
def test_constants_in_8_bits_cost_next_to_nothing(spread: float) -> None:
    """Double quantization (QLoRA, section 3) against float32 constants, by the mean square of the errors."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * spread
    exact = weight.unflatten(1, (-1, 64)).abs().amax(dim=2)
    single = written_out(packed_codes(weight, exact), exact, torch.float32)
    errors = [float((each - weight).square().mean()) for each in (held(weight, 64), single)]
    assert errors[0] < 1.005 * errors[1]


def test_rows_that_have_nothing_to_share_a_step_for() -> None:
    """Zeros, a single block, and weights of one size only."""
    assert torch.equal(held(torch.zeros(2, 64), 64), torch.zeros(2, 64))
    assert torch.equal(held(torch.full((2, 128), -0.5), 64), torch.full((2, 128), -0.5))
    one_block = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(held(one_block, 64).abs().amax(dim=1), one_block.abs().amax(dim=1))


@pytest.mark.parametrize("rows", [1, 100, 2 * WRITTEN_OUT // 512 + 3])
def test_products_are_those_of_the_weights_written_out(rows: int) -> None:
    """With fewer rows than are written out at a time, and with more."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(rows, 512, generator=generator), torch.randn(3, 512, generator=generator)
    kernel = NF4Linear(LinearShape("layer", 512, rows, has_bias=True), torch.device("cpu"), 64)
    kernel.load(slice(0, rows), weight)
    bias = torch.randn(rows, generator=generator)
    torch.testing.assert_close(kernel.apply(x, bias), x @ held(weight, 64).T + bias, rtol=1e-4, atol=1e-4)


def test_layers_that_blocks_do_not_fit_are_left_with_a_reason() -> None:
    method = NF4Method(NF4Method.Options(), QuantizationNeed("cpu", "float32"))
    support = method.describe(LinearShape("model.layers.0.mlp.down_proj", 96, 64, has_bias=False))
    assert not support.is_served
    assert "no multiple of 64" in str(support.why_not)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    save_story_model(directory)
    return directory


@pytest.fixture
def engine(story: Path) -> Iterator[LLM]:
    llm = LLM(**config(story))
    yield llm
    llm.shutdown()


def config(model: Path, **options: Any) -> dict[str, Any]:
    quantization = {"name": "nf4", "block_size": 16, **options}
    return {"model": {"path": str(model), "dtype": "float32", "quantization": quantization}}


FIRST_SENTENCE = STORY[: STORY.index(" She liked")]


def told(llm: LLM) -> str:
    (output,) = llm.generate([FIRST_SENTENCE], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 60
    return output.outputs[0].text


def test_a_model_in_4_bits_tells_its_story(engine: LLM) -> None:
    assert STORY.startswith(FIRST_SENTENCE + told(engine))


def test_a_model_that_slept_tells_it_again(engine: LLM) -> None:
    """At level 2 the weights are dropped, and loaded again from the checkpoint, into the same memory."""
    before = told(engine)
    assert engine.sleep(level=2) > 0
    engine.wake_up()
    assert told(engine) == before


def test_a_skipped_layer_that_is_not_there_is_refused(story: Path) -> None:
    with pytest.raises(DovetailError, match="no layer's name contains 'down_prj'"):
        LLM(**config(story, skip=["down_prj"]))


def test_an_odd_block_size_is_refused(story: Path) -> None:
    with pytest.raises(DovetailError, match="two weights share a byte"):
        LLM(**config(story, block_size=15))
