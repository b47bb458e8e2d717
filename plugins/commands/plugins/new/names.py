"""The names that a new distribution goes by, and which of them cannot be used."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from dovetail.commands.installed import HOOKS_KIND, Registry
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kinds import KINDS
from dovetail.plugins.commands.plugins.lookup import unknown_kind

MAX_LENGTH = 40
"""Characters of a name: with more, lines of the generated files would be too long."""
SUMMARIES: Mapping[str, str] = {
    **{kind.name: kind.summary for kind in KINDS.values()},
    HOOKS_KIND: "listens to the life of an engine",
}
"""A line for each kind, hooks among them."""
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A name of a distribution, by PEP 508."""
_AUTHOR = re.compile(r"(?P<name>[^<>]*)<(?P<email>[^<>]*\S[^<>]*)>")
_ATOM, _LABEL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", r"\w(?:[\w-]*\w)?"
_ADDRESS = re.compile(rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+")
"""What build backends take for an address; rarer forms ("a b"@example.org) are left out."""


@dataclass(frozen=True)
class ProjectNames:
    """What a new distribution is called."""

    distribution: str
    """As pip installs it: "acme-drafter"."""

    @property
    def package(self) -> str:
        """As Python imports it, and as configs name the plugin: "acme_drafter"."""
        return re.sub(r"[-.]", "_", self.distribution).lower()

    @property
    def class_name(self) -> str:
        """The plugin's class: "AcmeDrafter"."""
        return "".join(part[0].upper() + part[1:] for part in self.package.split("_") if part)


@dataclass(frozen=True)
class Author:
    """Who is named in the metadata."""

    name: str = ""
    email: str = ""


def checked_kind(kind: str) -> str:
    """The kind, spelled with underscores. Raises `ConfigError` with the nearest kinds for one that does not exist."""
    spelled = kind.strip().replace("-", "_")
    if spelled in SUMMARIES:
        return spelled
    raise unknown_kind(spelled)


def spelled_names(name: str) -> ProjectNames:
    """The names that follow from `name`. Raises `ConfigError` where it cannot be one."""
    names = ProjectNames(name.strip())
    if reason := _reason_against(names):
        raise _unusable(name, reason)
    return names


def check_free(names: ProjectNames, kind: str | None) -> None:
    """Raises `ConfigError` where one of the names is taken. `kind` may be unknown still (None); then names of plugins
    are not compared."""
    package = names.package
    spec = importlib.util.find_spec(package)
    if spec is not None:
        place = f" in {Path(spec.origin).parent}" if spec.origin and Path(spec.origin).is_file() else ""
        reason = f"Python finds a package '{package}' already{place}, which it would hide: choose another name"
        raise _unusable(names.distribution, reason)
    entries = Registry.scan().metadata.entries if kind is not None else ()
    taken = [entry for entry in entries if (entry.kind, entry.name) == (kind, package)]
    if taken:
        raise ConfigError(f"there is a {kind} '{package}' already, of {taken[0].origin}: choose another name")


def checked_names(name: str, kind: str | None) -> ProjectNames:
    """The names that follow from `name`, which can be used and are free."""
    names = spelled_names(name)
    check_free(names, kind)
    return names


def _unusable(name: str, reason: str) -> ConfigError:
    return ConfigError(f"'{name}' cannot be the name of a distribution with a plugin: {reason}")


def _reason_against(names: ProjectNames) -> str | None:
    package = names.package
    if not _DISTRIBUTION.fullmatch(names.distribution):
        return "a name has letters, digits, '-', '_' and '.', and begins and ends with a letter or a digit (PEP 508)"
    if not package.isidentifier() or keyword.iskeyword(package) or keyword.issoftkeyword(package):
        return f"Python cannot import a package '{package}': begin with a letter, and take no word of the language"
    if len(package) > MAX_LENGTH:
        return f"it has {len(package)} characters, and at most {MAX_LENGTH} are allowed"
    if package == "auto" or yaml.safe_load(package) != package:
        return f"'{package}' means something else in a config: choose another name"
    return None


def checked_author(text: str) -> Author:
    """Reads "Name", "Name <address>", an address or nothing. Raises `ConfigError` for what is none of them, or is not
    accepted as an author in a pyproject.toml."""
    text = text.strip()
    if (found := _AUTHOR.fullmatch(text)) is not None:
        name, email = found["name"].strip(), found["email"].strip()
    else:
        name, email = ("", text) if "@" in text else (text, "")
    if len(name) > 1 and name[0] == name[-1] == '"':
        name = name[1:-1].strip()
    if reason := _reason_against_author(name, email):
        raise ConfigError(f'--author {text!r} {reason}: write "Name <address>", like "Ada Lovelace <ada@example.org>"')
    return Author(name, email)


def _reason_against_author(name: str, email: str) -> str | None:
    if not (name + email).isprintable():
        return "has line breaks or other characters that cannot be printed"
    if set(name + email) & set("<>"):
        return "has no address between < and > at its end"
    if "," in name:
        return "has a comma, which a name in a pyproject.toml must not have (PEP 621)"
    if email and not _ADDRESS.fullmatch(email):
        return f"has no address that mail can go to ({email!r})"
    return None
