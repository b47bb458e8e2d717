"""JSON bodies: written, and read, checked against a Struct, and refused with the name of the field that is wrong.

class Ask(Body, kw_only=True):
    prompt: str
    max_tokens: int | None = None

asks = BodyReader(Ask)
ask = await asks.read(request)
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, Generic, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.route import APIError
from dovetail.plugins.server.surrogates import half_pair_in


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of a request's body. Fields that it does not declare are refused, so that no option is ignored: declare as
    `Ignored` those that change nothing."""


Ignored = Any
"""Type of a field that may have any value, and is not read."""

T = TypeVar("T", bound=Body)

_PLACE = re.compile(r"^(?P<what>.*) - at `(?P<place>.*)`$", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `(?P<place>.*)`)?$", re.DOTALL)


class BodyReader(Generic[T]):
    """Reads bodies of one type."""

    def __init__(self, kind: type[T]):
        self._decoder = msgspec.json.Decoder(kind)
        self._known = [field.encode_name for field in msgspec.structs.fields(kind)]

    async def read(self, request: Request) -> T:
        """The body of a request. Raises `APIError` 400 for what is no JSON of this type, and says which field."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(400, f"the body must be JSON: set content-type: application/json, not {kind or 'none'}")
        return self.decode(await request.body())

    def decode(self, body: bytes) -> T:
        """As `read`, of a body that is there."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(str(error)) from None
        except UnicodeDecodeError as error:
            raise APIError(400, f"the body is not UTF-8: {error}") from None
        except msgspec.DecodeError as error:
            raise _explain_syntax(body, str(error)) from None
        except RecursionError:
            raise _nested() from None

    def _explain(self, message: str) -> APIError:
        unknown = _UNKNOWN.match(message)
        if unknown is not None:
            name, place = unknown["name"], _dotted(unknown["place"] or "$")
            near = difflib.get_close_matches(name, self._known, n=1, cutoff=0.6) if not place else []
            hint = f", did you mean {near[0]}?" if near else ", which this server does not know and will not ignore"
            return APIError(400, f"unknown field {name!r}{hint}", param=f"{place}.{name}".lstrip("."))
        found = _PLACE.match(message)
        if found is None:
            return APIError(400, message)
        param = _dotted(found["place"])
        return APIError(400, f"{param}: {found['what']}" if param else found["what"], param=param or None)


def _explain_syntax(body: bytes, message: str) -> APIError:
    """Of a body that msgspec calls malformed or truncated, which may be for half of a surrogate pair alone."""
    place = None
    if _SURROGATE.search(body) is not None:
        try:
            place = half_pair_in(json.loads(body))
        except RecursionError:
            return _nested()
        except ValueError:
            pass  # it is malformed elsewhere too
    if place is None:
        return APIError(400, f"the body is no JSON: {message}")
    where = place or "the body"
    return APIError(
        400, f"{where} has half of a surrogate pair, which is no character: leave it out", param=place or None
    )


def _nested() -> APIError:
    return APIError(400, "the body is nested too deeply")


def json_response(content: Any) -> Response:
    """The response of an endpoint that answers with JSON."""
    return Response(orjson.dumps(content), media_type="application/json")


def body_schema(kind: type[Body]) -> dict[str, Any]:
    """What /openapi.json says of a body: `openapi_extra` of an endpoint."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, components)}}}
    }


def _inlined(node: Any, components: dict[str, Any]) -> Any:
    """The schema with references replaced by what they name: FastAPI adds no components of others."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(components[node["$ref"].rpartition("/")[2]], components)
        return {key: _inlined(value, components) for key, value in node.items()}
    return [_inlined(item, components) for item in node] if isinstance(node, list) else node


def _dotted(place: str) -> str:
    """msgspec's "$.a[0][...]" as "a.0"."""
    return re.sub(r"\[(\d+)\]", r".\1", place.removeprefix("$").replace("[...]", "")).lstrip(".")
