"""What an `update_info` announces of a bucket, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dovetail.contracts.errors import RequestError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
Size = Annotated[int, Field(ge=0)]


class Given(BaseModel):
    """An `init_info` or `update_info`: no other keys, and no values that would have to be converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Announced(Given):
    """Names, dtypes and shapes of the tensors of a bucket, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[Size] | tuple[Size, ...]]

    @model_validator(mode="after")
    def _fits(self) -> Announced:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtype_names)} dtype_names and {len(self.shapes)} shapes: there is"
                " one of each per tensor"
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError("names has a name twice")
        if unknown := set(self.dtype_names) - DTYPES.keys():
            raise ValueError(f"dtype_names has {', '.join(sorted(unknown))}; known are {', '.join(DTYPES)}")
        return self

    def tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int]]:
        """Of each tensor: name, dtype, shape, bytes."""
        for name, dtype_name, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            dtype = DTYPES[dtype_name]
            yield name, dtype, tuple(shape), prod(shape) * dtype.itemsize


GivenType = TypeVar("GivenType", bound=Given)


def parsed(kind: type[GivenType], given: Mapping[str, Any], what: str) -> GivenType:
    """`given`, checked. Raises `RequestError` that says what is wrong with which key of `what`."""
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or what}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors()
        )
        raise RequestError(f"{what} takes {', '.join(kind.model_fields)}: {faults}") from error
