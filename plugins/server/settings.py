"""What an API process is told: the section `server` of the config as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CORSSettings:
    """Which pages of other origins may call the server."""

    allow_origins: tuple[str, ...] = ()
    """Empty: none."""
    allow_methods: tuple[str, ...] = ("*",)
    allow_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, kw_only=True)
class TLSSettings:
    """Files and rules of HTTPS."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    """A value of `ssl.VerifyMode`."""
    ciphers: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One API process. Times are in seconds, None means no limit."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    """Path of a Unix socket, in place of host and port."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Empty: no key is asked for."""
    root_path: str = ""
    max_body_mib: float = 8.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 5.0
    request_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    cors: CORSSettings = CORSSettings()
    tls: TLSSettings | None = None
    docs: bool = True
    """Whether /docs and /openapi.json are served."""
    request_chat_templates: bool = True
    """Whether requests may bring a chat template."""
    log_level: str = "info"
    access_log: bool = True

    @property
    def max_body_bytes(self) -> int:
        """Longest body of a request."""
        return int(self.max_body_mib * 2**20)

    @property
    def url(self) -> str:
        """Where clients reach the server."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls is not None else 'http'}://{host}:{self.port}{self.root_path}"


def server_settings(section: Mapping[str, Any]) -> ServerSettings:
    """The settings of one API process, from the section `server` as plain data, its API keys in the clear. Keys that
    concern the processes as a whole are left out."""
    known = {item.name for item in fields(ServerSettings)} - {"cors", "tls", "api_keys"}
    cors = section["cors"]
    return ServerSettings(
        cors=CORSSettings(
            allow_origins=tuple(cors["allow_origins"]),
            allow_methods=tuple(cors["allow_methods"]),
            allow_headers=tuple(cors["allow_headers"]),
            allow_credentials=cors["allow_credentials"],
        ),
        tls=TLSSettings(**section["tls"]) if section["tls"] is not None else None,
        api_keys=tuple(section["api_keys"]),
        **{name: value for name, value in section.items() if name in known},
    )
