"""The public surface as text: one stub per public module, read from the source by griffe without importing it.

A stub holds what a caller or an implementer can come to depend on: names, bases, decorators, parameters with kinds,
annotations and defaults, fields in order, values of constants, enums and ClassVars, what is abstract. Docstrings and
bodies are left out. The stub is Python, so that the record is read back the same way (`parse`).
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import griffe

LONGEST_VALUE = 200
"""Longer values, computed ones and versions are recorded as "...": the name is public, its content is not."""
LONGEST_LINE = 100
"""Longer signatures have a line for each parameter, so that a diff shows which one changed."""
_DECORATORS = ("dataclass", "final", "runtime_checkable", "contextmanager", "hookspec", "abstractmethod", "overload")
_UNRECORDED = {"__slots__", "__post_init__", "__repr__", "__str__", "__all__", "__doc__", "model_config"}
_MARKERS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def load(search_path: Path, package: str) -> griffe.Module:
    """The whole package below `search_path`, re-exports resolved."""
    loader = griffe.GriffeLoader(search_paths=[search_path], extensions=griffe.Extensions())
    module = loader.load(package)
    loader.resolve_aliases(external=False)
    assert isinstance(module, griffe.Module)
    return module


def parse(name: str, text: str) -> griffe.Module:
    """The module `name` from its stub."""
    return griffe.visit(name, filepath=Path(f"{name}.pyi"), code=text)


def module_at(package: griffe.Module, path: str) -> griffe.Module:
    """The module `path` of the package. Raises LookupError where there is none."""
    found: object = package
    for name in path.split(".")[1:]:
        found = found.members.get(name) if isinstance(found, griffe.Module) else None
    if not isinstance(found, griffe.Module):
        raise LookupError(f"there is no module {path}, which commands/diagnosis/public_modules.toml names")
    return found


def stub(module: griffe.Module, public: Mapping[str, str]) -> str:
    """The stub of `module`. `public` maps each public module to the pattern of its names that are. Names of `__all__`
    that come from another public module become an import, all others are written out."""
    writer = _Writer(module, public)
    members = [member for member in _public_members(module) if fnmatchcase(member.name, public[module.path])]
    body = [line for member in members for line in writer.member(member)]
    if module.exports is not None:
        body = ["__all__ = [", *(f'    "{name}",' for name in sorted(map(str, module.exports))), "]", *body]
    imports = [
        f"from {home} import {', '.join(sorted(names))}" if home else f"import {', '.join(sorted(names))}"
        for home, names in sorted(writer.imports.items())
        if names
    ]
    return "\n".join([*imports, "", *body]).strip() + "\n"


def _public_members(module: griffe.Module) -> Iterator[griffe.Object | griffe.Alias]:
    if module.exports is not None:
        yield from (module.members[str(name)] for name in sorted(map(str, module.exports)))
        return
    for name, member in module.members.items():
        if not name.startswith("_") and not member.is_alias and not member.is_module:
            yield member


class _Writer:
    """Writes the members of one module, and collects the imports that their annotations need."""

    def __init__(self, module: griffe.Module, public: Mapping[str, str]):
        self._module = module
        self._public = public
        self._written = {
            member.final_target.path
            for member in _public_members(module)
            if isinstance(member, griffe.Alias) and not self._is_public(member.final_target)
        }
        """Paths of what is defined in modules that are not public, and written out here."""
        self.imports: dict[str, set[str]] = defaultdict(set)
        """Module -> names, as they stand behind `import`; "": modules themselves."""

    def member(self, member: griffe.Object | griffe.Alias) -> list[str]:
        """The lines of one member of the module."""
        if not isinstance(member, griffe.Alias):
            return self._object(member)
        home, _, name = member.final_target.path.rpartition(".")
        if home in self._public:
            self.imports[home].add(name if name == member.name else f"{name} as {member.name}")
            return []
        return self._object(member.final_target)

    def _object(self, member: griffe.Object | griffe.Alias) -> list[str]:
        if isinstance(member, griffe.Class):
            return ["", *self._class(member), ""]
        if isinstance(member, griffe.Function):
            return self._function(member)
        assert isinstance(member, griffe.Attribute), member
        return self._attribute(member)

    def _class(self, cls: griffe.Class) -> list[str]:
        bases = [self._text(base) for base in self._bases_of(cls)]
        bases += [f"{name}={self._text(value)}" for name, value in cls.keywords.items()]
        body = [line for member in self._members_of(cls) for line in self._object(member)]
        head = f"class {cls.name}({', '.join(bases)}):" if bases else f"class {cls.name}:"
        return [
            *self._decorators(cls.decorators),
            head,
            *textwrap.indent("\n".join(body or ["..."]), "    ").split("\n"),
        ]

    def _members_of(self, cls: griffe.Class) -> Iterator[griffe.Object]:
        """Its public members, and those that it has from bases of the package whose modules are not public."""
        names = set()
        for owner in (cls, *(base for base in _mro(cls) if self._is_hidden(base))):
            for name, member in owner.members.items():
                if name not in names and isinstance(member, griffe.Object) and self._is_recorded(name, member):
                    names.add(name)
                    yield member

    def _bases_of(self, cls: griffe.Class) -> Iterator[griffe.Expr | str]:
        """Its bases; in place of one that is hidden, the bases of that one."""
        for base in cls.bases:
            path = base.canonical_path if isinstance(base, griffe.Expr) else base
            hidden = next((each for each in _mro(cls) if each.path == path and self._is_hidden(each)), None)
            yield from [base] if hidden is None else self._bases_of(hidden)

    def _is_hidden(self, cls: griffe.Class) -> bool:
        """Whether nobody finds the class in a stub."""
        return cls.path not in self._written and not self._is_public(cls)

    def _is_public(self, found: griffe.Object | griffe.Alias) -> bool:
        """Whether it has a place in the stub of its own module."""
        pattern = self._public.get(found.module.path)
        return pattern is not None and fnmatchcase(found.name, pattern) and not found.name.startswith("_")

    def _is_recorded(self, name: str, member: griffe.Object) -> bool:
        """Tests of a conformance suite are called by pytest alone, and are not recorded."""
        is_special = name.startswith("__") and name.endswith("__")
        if name in _UNRECORDED or name.startswith("test_"):
            return False
        return is_special or not name.startswith("_") or "abstractmethod" in member.labels

    def _function(self, function: griffe.Function) -> list[str]:
        labels = [label for label in ("classmethod", "staticmethod") if label in function.labels]
        heads = [self._head(each) for each in function.overloads or ()] or [self._head(function)]
        decorators = [*(f"@{label}" for label in labels), *self._decorators(function.decorators)]
        if function.overloads:
            self.imports["typing"].add("overload")
            decorators.append("@overload")
        return [line for head in heads for line in (*decorators, head)]

    def _head(self, function: griffe.Function) -> str:
        returns = f" -> {self._text(function.returns)}" if function.returns is not None else ""
        word = "async def" if "async" in function.labels else "def"
        parameters = list(self._parameters(function.parameters))
        line = f"{word} {function.name}({', '.join(parameters)}){returns}: ..."
        if len(line) <= LONGEST_LINE:
            return line
        return "\n".join([f"{word} {function.name}(", *(f"    {each}," for each in parameters), f"){returns}: ..."])

    def _parameters(self, parameters: Iterable[griffe.Parameter]) -> Iterator[str]:
        kinds = griffe.ParameterKind
        previous = None
        for parameter in parameters:
            if previous is kinds.positional_only and parameter.kind is not previous:
                yield "/"
            if parameter.kind is kinds.keyword_only and previous not in (kinds.keyword_only, kinds.var_positional):
                yield "*"
            previous = parameter.kind
            text = _MARKERS.get(parameter.kind, "") + parameter.name
            if parameter.annotation is not None:
                text += f": {self._text(parameter.annotation)}"
            if parameter.default is not None and parameter.kind not in _MARKERS:
                text += f" = {self._value(parameter.default)}"
            yield text
        if previous is kinds.positional_only:
            yield "/"

    def _attribute(self, attribute: griffe.Attribute) -> list[str]:
        if "property" in attribute.labels:
            abstract = ["@abstractmethod"] if "abstractmethod" in attribute.labels else []
            self.imports["abc"].update(["abstractmethod"] if abstract else [])
            annotation = f" -> {self._text(attribute.annotation)}" if attribute.annotation is not None else ""
            return ["@property", *abstract, f"def {attribute.name}(self){annotation}: ..."]
        if attribute.labels >= {"instance-attribute"} and "class-attribute" not in attribute.labels:
            return [f"{attribute.name}: {self._instance_type(attribute)}"]
        annotation = "" if attribute.annotation is None else self._text(attribute.annotation)
        if annotation and attribute.labels == {"class-attribute"}:
            self.imports["typing"].add("ClassVar")
            annotation = f"ClassVar[{annotation}]"
        kept = _without_notes(attribute.value)
        value = "" if kept is None else f" = {self._value(kept)}"
        return [f"{attribute.name}{': ' if annotation else ''}{annotation}{value}"]

    def _instance_type(self, attribute: griffe.Attribute) -> str:
        """Of an attribute that is set in a method: what is written there, or the annotation of the parameter that is
        kept."""
        if attribute.annotation is not None:
            return self._text(attribute.annotation)
        init = attribute.parent.members.get("__init__") if isinstance(attribute.parent, griffe.Class) else None
        if isinstance(init, griffe.Function) and str(attribute.value) in init.parameters:
            return self._text(init.parameters[str(attribute.value)].annotation or "...")
        try:
            value = ast.literal_eval(str(attribute.value))
        except (ValueError, SyntaxError):
            return "..."
        return type(value).__name__ if value is not None else "..."

    def _value(self, value: griffe.Expr | str) -> str:
        """A value as it is written, a constant that is not public replaced by its own."""
        constant = self._hidden_constant(value)
        if constant is not None:
            return self._value(constant)
        computed = (griffe.ExprListComp, griffe.ExprDictComp, griffe.ExprSetComp, griffe.ExprGeneratorExp)
        is_version = isinstance(value, griffe.ExprCall) and str(value.function) == "ContractVersion"
        if is_version or len(str(value)) > LONGEST_VALUE or any(isinstance(part, computed) for part in _parts(value)):
            return "..."
        return self._text(value)

    def _hidden_constant(self, value: griffe.Expr | str) -> griffe.Expr | str | None:
        """The value behind the name of a constant that nobody finds in a stub."""
        if not isinstance(value, griffe.ExprName):
            return None
        try:
            constant = self._module.modules_collection.get_member(value.canonical_path)
        except KeyError:
            return None
        return constant.value if isinstance(constant, griffe.Attribute) and not self._is_public(constant) else None

    def _decorators(self, decorators: Iterable[griffe.Decorator]) -> list[str]:
        return [
            f"@{self._text(decorator.value)}"
            for decorator in decorators
            if decorator.callable_path.rpartition(".")[2] in _DECORATORS
        ]

    def _text(self, expression: griffe.Expr | str) -> str:
        """The expression as it is written, its names imported."""
        for part in _parts(expression):
            if isinstance(part, griffe.ExprName) and isinstance(part.parent, griffe.Object):
                self._import(part.name, part.canonical_path, part.parent.module)
        return str(expression)

    def _import(self, name: str, path: str, seen_in: griffe.Module) -> None:
        home, _, original = path.rpartition(".")
        if path in self._written or (not home and name not in seen_in.members):
            return  # here, or a builtin
        here = self._module.members.get(path.removeprefix(f"{self._module.path}.").partition(".")[0])
        if not home or here is None or here.is_alias or here.is_module:
            self.imports[home].add(original if name == original else f"{original} as {name}")


def _without_notes(value: griffe.Expr | str | None) -> griffe.Expr | str | None:
    """A field's default: without what its description and metadata say, and without `field(...)` that says no more."""
    if not isinstance(value, griffe.ExprCall) or str(value.function) not in ("field", "Field"):
        return value
    notes = ("description", "metadata")
    kept = [a for a in value.arguments if not isinstance(a, griffe.ExprKeyword) or a.name not in notes]
    match kept:
        case []:
            return None
        case [griffe.ExprKeyword(name="default", value=default)]:
            return default
        case [default] if not isinstance(default, griffe.ExprKeyword):
            return default
    return griffe.ExprCall(value.function, kept)


def _mro(cls: griffe.Class) -> list[griffe.Class]:
    try:
        return list(cls.mro())
    except ValueError:  # bases that griffe cannot put in order: none of ours, then
        return []


def _parts(expression: griffe.Expr | str) -> Iterator[griffe.Expr | str]:
    """The expression and all that it is made of."""
    yield expression
    if isinstance(expression, griffe.Expr):
        for part in expression.iterate(flat=False):
            if part is not expression:
                yield from _parts(part)
