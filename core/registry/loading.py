"""Imports one plugin and checks that it is what it claims to be.

`sys.modules` is the only cache, so that code runs once per process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import get_args

from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.needs import unbacked
from dovetail.contracts.plugin import Plugin, PluginOptions, Stability
from dovetail.registry.contents import siblings
from dovetail.registry.distributions import requirements
from dovetail.registry.entries import Entry, Problem, normalize_name, version_refusal
from dovetail.registry.slow_imports import warn_if_slow

_PLUGIN_ERRORS = (Exception, SystemExit)
"""What plugin code may raise without ending the host. A plugin that exits on import is a broken plugin."""


def is_file_reference(reference: str) -> bool:
    """Whether a reference names a file ("./file.py:Class") rather than a module."""
    return reference.rpartition(":")[0].endswith(".py")


def load_entry(entry: Entry) -> type[Plugin]:
    """Imports the plugin behind `entry`.

    Raises `PluginError` whose first line is the reason; the traceback follows where plugin code raised.
    """
    if entry.refusal is not None:
        raise PluginError(f"{entry.label}: {entry.refusal}")
    found = import_object(entry)
    base = base_class(entry.kind)
    if not (isinstance(found, type) and issubclass(found, Plugin) and issubclass(found, base)):
        raise PluginError(
            f"{entry.label}: {entry.reference} is no subclass of {base.__module__}.{base.__qualname__}, "
            f"which every {entry.kind} must derive from"
        )
    for problem in class_problems(entry, found):
        raise PluginError(f"{entry.label}: {problem.message}")
    return found


def class_problems(entry: Entry, plugin: type[Plugin]) -> Iterator[Problem]:
    """Why the host cannot use a class of the entry's kind: nothing for one that it can."""
    base = base_class(entry.kind)
    for code, problem in _contract_problems(entry, plugin):
        yield Problem(code, entry.label, problem)
    for code, problem in _shape_problems(plugin, base):
        yield Problem(code, entry.label, problem)


def base_class(kind: str) -> type[Plugin]:
    """The abstract base class of a component kind."""
    module, _, name = KINDS[kind].base.partition(":")
    base: type[Plugin] = vars(importlib.import_module(module))[name]
    return base


def class_facts(base: type[Plugin]) -> list[str]:
    """Names of the class variables that a kind's plugins declare, in the order of the contract."""
    return class_variables(base)


def class_variables(owner: type) -> list[str]:
    """Names of the class variables that a class and its bases declare, those of the bases first."""
    declared = (
        name
        for base in reversed(owner.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
        if str(annotation).startswith("ClassVar")
    )
    return list(dict.fromkeys(declared))


def infer_kind(entry: Entry) -> str:
    """The component kind of a class that is named by a direct reference."""
    found = import_object(entry)
    kinds = [kind for kind in KINDS if isinstance(found, type) and issubclass(found, base_class(kind))]
    if len(kinds) != 1:
        raise PluginError(f"{entry.label}: it derives from no one plugin base class of dovetail.contracts")
    return kinds[0]


def import_object(entry: Entry) -> object:
    """Imports the object of the entry's reference: "module", "module:name" or "/absolute/file.py:name"."""
    if entry.is_own:
        return _import_object(entry)
    return warn_if_slow(entry.label, partial(_import_object, entry))


def _import_object(entry: Entry) -> object:
    module_name, _, attribute = entry.reference.rpartition(":")
    if not module_name:
        module_name, attribute = attribute, ""
    try:
        module = (
            _import_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        )
    except _PLUGIN_ERRORS as error:
        raise PluginError(_import_failure(entry, module_name, error)) from error
    found: object = module
    for name in attribute.split(".") if attribute else ():
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise PluginError(f"{entry.label}: {module_name} has no '{attribute}'") from error
        except _PLUGIN_ERRORS as error:  # a module may import its names on demand
            raise PluginError(_import_failure(entry, module_name, error)) from error
    return found


def local_module_name(path: Path) -> str:
    """The name under which a local file is imported: the same in every process that imports the same path."""
    return f"dovetail_local_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}_{path.stem}"


def _import_file(path: Path) -> ModuleType:
    name = local_module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs, as an import does: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    beside = siblings(path)
    if beside and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
        _refuse_others(path, beside)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _refuse_others(path: Path, beside: Mapping[str, Path]) -> None:
    """Raises `ImportError` where a module of the same name was imported in place of the file beside `path`."""
    for name, file in beside.items():
        imported = getattr(sys.modules.get(name), "__file__", None)
        if imported is not None and Path(imported).resolve() != file.resolve():
            raise ImportError(
                f"{path} imports '{name}' and got {imported}, not {file} beside it: rename that file, or make a package"
                " of the plugin"
            )


def _import_failure(entry: Entry, module_name: str, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        if f"{module_name}.".startswith(f"{error.name}."):
            reason = f"there is no module '{error.name}'"
        else:
            reason = f"it needs the module '{error.name}', which is not installed here{_extra_hint(entry, error.name)}"
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list(
        [frame for frame in report.stack if frame.filename != __file__ and "importlib" not in frame.filename]
    )
    return f"{entry.label} cannot be imported: {reason}\n\n{''.join(report.format()).rstrip()}"


def _extra_hint(entry: Entry, module: str) -> str:
    """The extra of the plugin's own distribution that installs a missing module, by its metadata."""
    if entry.distribution is None:
        return ""
    wanted = normalize_name(module.partition(".")[0])
    for requirement in requirements(entry.distribution):
        match = re.match(r"[\w.-]+", requirement)
        if match is None or normalize_name(match[0]) != wanted:
            continue
        extra = re.search(r"""extra\s*==\s*["']([\w.-]+)["']""", requirement)
        wish = f"{entry.distribution}[{extra[1]}]" if extra else match[0]
        return f': pip install "{wish}"'
    return ""


def _contract_problems(entry: Entry, plugin: type[Plugin]) -> Iterator[tuple[str, str]]:
    host = KINDS[entry.kind].version
    declares = f"contract = ({host.major}, {host.minor})"
    name, undeclared = plugin.__qualname__, "contract-version"
    try:
        major, minor = plugin.contract
    except AttributeError:
        yield undeclared, f"{name} does not say which contract it was written for: add `{declares}` to the class"
        return
    except (TypeError, ValueError):
        yield undeclared, f"{name}.contract is {plugin.contract!r}, not (major, minor): write `{declares}`"
        return
    if major != host.major or minor > host.minor:
        yield "other-contract", version_refusal(entry.kind, f"{major}.{minor}", major, entry.distribution)


def _shape_problems(plugin: type[Plugin], base: type[Plugin]) -> Iterator[tuple[str, str]]:
    """Why the host cannot create the class."""
    name = plugin.__qualname__
    if plugin.__abstractmethods__:
        yield "missing-method", f"{name} does not implement {', '.join(sorted(plugin.__abstractmethods__))}"
    if not isinstance(plugin.capabilities, type(base.capabilities)):
        record = type(base.capabilities).__name__
        message = f"{name}.capabilities is {plugin.capabilities!r}: write `capabilities = {record}(...)`"
        yield "capabilities-record", message
    else:
        for message in unbacked(plugin):
            yield "false-capability", message
    if plugin.stability not in get_args(Stability):
        tiers = ", ".join(map(repr, get_args(Stability)))
        yield "unknown-stability", f"{name}.stability is {plugin.stability!r}: write one of {tiers}"
    if not (isinstance(plugin.Options, type) and issubclass(plugin.Options, PluginOptions)):
        yield "options-model", f"{name}.Options is no subclass of dovetail.contracts.plugin.PluginOptions"
