"""`python -m dovetail.worker --join HOST:PORT`: lends this machine to an engine whose executor is `joined`."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.joining import (
    COMPARED_PACKAGES,
    JoinedNode,
    dial,
    keep_alive,
    parse_address,
    read_key,
    set_patience,
    write_key,
)
from dovetail.registry.distributions import installed_versions

_PR_SET_PDEATHSIG = 1
_RETRY_S = 0.25
_GREETING_S = 10.0
"""Seconds in which the driver must prove that it has the key."""


class _Refused(Exception):
    """The driver does not need this machine now."""


def main(arguments: list[str] | None = None) -> int:
    """Joins drivers one after the other. Returns the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)
    if options.end_with_parent:
        if sys.platform != "linux":
            _parser().error("--end-with-parent needs Linux")
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if options.new_key is not None:
            write_key(options.new_key)
            return 0
        if options.join is None or options.key_file is None:
            raise ConfigError("--join HOST:PORT and --key-file PATH are needed, or --new-key PATH to make a key")
        return _join(options, read_key(options.key_file))
    except (ConfigError, AuthenticationError, TimeoutError) as error:
        print(f"python -m dovetail.worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dovetail.worker",
        description="Lends this machine to an engine whose config says `executor: {name: joined}`: starts the worker"
        " processes that the engine asks for, and ends them with it. Joins again when the engine ends.",
    )
    parser.add_argument("--join", metavar="HOST:PORT", type=_address, help="where the engine listens")
    parser.add_argument("--key-file", metavar="PATH", type=Path, help="the key that the engine has too")
    parser.add_argument("--new-key", metavar="PATH", type=Path, help="write a new random key, and end")
    parser.add_argument("--name", default=socket.gethostname(), help="name of this machine (default: its host name)")
    parser.add_argument(
        "--address", help="IP address by which other machines reach this one (default: that of the route to HOST)"
    )
    parser.add_argument("--once", action="store_true", help="end with the first engine, rather than join the next")
    parser.add_argument(
        "--end-with-parent", action="store_true", help="end when the process that started this one does (Linux)"
    )
    parser.add_argument(
        "--patience-s",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="end where no engine listens for so long (default: 600)",
    )
    return parser


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _join(options: argparse.Namespace, key: bytes) -> int:
    last_contact, said = time.monotonic(), ""
    while True:
        try:
            connection, node, module = _greet(options, key)
        except (OSError, EOFError, _Refused) as error:
            if isinstance(error, _Refused):
                last_contact = time.monotonic()
            if (why := _why(error)) != said:
                said = why
                _say(f"waiting for an engine at {_shown(options.join)}: {why}")
            if time.monotonic() - last_contact > options.patience_s:
                raise TimeoutError(
                    f"no engine at {_shown(options.join)} for {options.patience_s:g} s ({why}): start the engine, and"
                    " give --join the address and port that its config has as executor.listen"
                ) from None
            time.sleep(_RETRY_S)
            continue
        with connection:
            _say(f"joined the engine at {_shown(options.join)} as node {node.name} ({node.address})")
            why = importlib.import_module(module).serve_node(connection, node)
        _say(f"the engine at {_shown(options.join)} is gone ({why}); its workers on this machine were ended")
        if options.once:
            return 0
        last_contact, said = time.monotonic(), ""


def _why(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the engine ended the connection"
    if isinstance(error, BlockingIOError):
        return "it does not answer"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _greet(options: argparse.Namespace, key: bytes) -> tuple[Connection, JoinedNode, str]:
    """Dials the driver, and gets its answer."""
    try:
        connection = dial(options.join, key, patience_s=_GREETING_S)
    except AuthenticationError:
        raise AuthenticationError(f"the engine at {_shown(options.join)} has another key than --key-file") from None
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            keep_alive(end, _GREETING_S)
            address = options.address or end.getsockname()[0]
        node = JoinedNode(name=options.name, address=address, driver=options.join, key=key)
        answer = _exchange(connection, node)
    except BaseException:
        connection.close()
        raise
    if "refused" in answer:
        connection.close()
        raise _Refused(answer["refused"])
    return connection, node, answer["module"]


def _exchange(connection: Connection, node: JoinedNode) -> dict[str, Any]:
    hello = {"role": "node", "name": node.name, "address": node.address, "versions": _versions()}
    connection.send_bytes(json.dumps(hello).encode())
    answer: dict[str, Any] = json.loads(connection.recv_bytes())
    set_patience(connection, 0.0)
    return answer


def _versions() -> dict[str, str]:
    return {"python": ".".join(map(str, sys.version_info[:3])), **installed_versions(COMPARED_PACKAGES)}


def _shown(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _say(text: str) -> None:
    print(f"dovetail worker: {text}", file=sys.stderr, flush=True)


def _leave(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
