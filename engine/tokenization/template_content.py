"""How a chat template reads the content of a message: part by part or as text, and whether it bears that there is
none."""

from __future__ import annotations

from jinja2 import nodes

_PART_FILTERS = frozenset({"map", "selectattr", "rejectattr"})


def reads_parts(template: nodes.Template) -> bool:
    """Whether content may stay a list of parts: the template loops over it, filters its parts, or takes one by number.

    Content is the key "content" of anything, whatever variable it is set to, and the argument of a macro that is
    called with it.
    """
    names = _all_names_of_content(template)
    loops = any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))
    filters = any(
        node.name in _PART_FILTERS and node.node is not None and _is_content(node.node, names)
        for node in template.find_all(nodes.Filter)
    )
    attributes = any(_takes_one(node.node, node.attr, names) for node in template.find_all(nodes.Getattr))
    items = any(_takes_one(node.node, _constant(node.arg), names) for node in template.find_all(nodes.Getitem))
    return loops or filters or attributes or items


def asks_for_content(template: nodes.Template) -> bool:
    """Whether the template asks if a message has content, and so bears one that has none."""
    names = _all_names_of_content(template)
    tests = any(
        test.name in ("defined", "undefined", "none") and _is_content(test.node, names)
        for test in template.find_all(nodes.Test)
    )
    return tests or any(
        _constant(compare.expr) == "content" and any(operand.op in ("in", "notin") for operand in compare.ops)
        for compare in template.find_all(nodes.Compare)
    )


def _all_names_of_content(template: nodes.Template) -> set[str]:
    names: set[str] = set()
    while (found := names | _names_of_content(template, names)) != names:
        names = found
    return names


def _names_of_content(template: nodes.Template, names: set[str]) -> set[str]:
    found = {
        node.target.name
        for node in template.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, names)
    }
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        found |= {arg.name for arg, value in zip(macro.args, call.args, strict=False) if _is_content(value, names)}
        found |= {keyword.key for keyword in call.kwargs if _is_content(keyword.value, names)}
    return found


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    return False


def _constant(node: nodes.Node) -> object:
    return node.value if isinstance(node, nodes.Const) else None


def _takes_one(part: nodes.Node, key: object, names: set[str]) -> bool:
    """content[0]["text"], and never content[0], which is a letter of a text."""
    return (
        key in ("text", "type")
        and isinstance(part, nodes.Getitem)
        and isinstance(_constant(part.arg), int)
        and _is_content(part.node, names)
    )
