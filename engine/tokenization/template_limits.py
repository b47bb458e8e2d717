"""A Jinja sandbox whose templates end: each rendering has a budget of steps, of characters and of processor time.

A template comes with the checkpoint. Jinja's own sandbox keeps it from reaching the interpreter, and nothing keeps it
from looping over a range in a range, or from doubling a string. Here everything that can take long or grow is charged
to the rendering's budget: turns of loops, calls, filters, tests, operators, comparisons, slices and what they give. No
list, tuple or mapping comes to be whose unfolded weight is over the budget, so that no single comparison, hash or
printing takes long.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from dovetail.engine.tokenization.template_forms import Form, read_braces, read_date, read_percents
from dovetail.engine.tokenization.template_weights import TOO_MUCH_TEXT, TemplateLimitError, Weights, size_of

_STEPS, _STEPS_PER_CHAR = 1_000_000, 20
_CHARS, _CHARS_PER_CHAR = 2**26, 1000
_LONGEST, _LONGEST_PER_CHAR = 2**22, 100
"""Of one value: characters of a text, items of a list. The second number is for each character of the messages."""
_SECONDS = 10.0
"""Of this thread's processor time, so that a busy machine takes nothing away."""
_STEPS_BETWEEN_LOOKS = 1024
_CHARS_PER_STEP = 256
_MOST_BITS = 4096
_STRUCTURAL = frozenset(
    {
        *("length", "count", "list", "first", "last", "map", "select", "reject", "selectattr", "rejectattr", "sort"),
        *("unique", "items", "dictsort", "default", "d", "groupby", "reverse", "min", "max", "sum", "attr", "abs"),
        *("int", "float", "round", "safe"),
    }
)
"""Filters that make no text of what they are given. Tests make none either, and are few."""
_COMPARING = frozenset(
    {
        *("sort", "unique", "min", "max", "groupby", "dictsort", "in", "eq", "equalto", "==", "ne", "!="),
        *("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
    }
)
"""Filters and tests that compare or hash what they are given."""
_FORMS = {"format": read_braces, "format_map": read_braces, "%": read_percents}
_WRITTEN_NUMBER = 20
_WRITTEN_DATE = 64
_SLOW_CODECS = ("punycode", "idna")
"""Their time grows with the square of the text."""
_LEFT_OUT = ("urlize", "pprint", "random", "lipsum")
"""Jinja's own that serve web pages and debugging; no budget fits them."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, input_size: int):
        """`input_size`: characters of what the template is given."""
        self._steps = _STEPS + _STEPS_PER_CHAR * input_size
        self._chars = _CHARS + _CHARS_PER_CHAR * input_size
        self.longest = _LONGEST + _LONGEST_PER_CHAR * input_size
        self._next_look = self._steps
        self._end = time.thread_time() + _SECONDS
        self.weights = Weights(self.longest, self.take_step)

    def take_step(self, size: int = 0) -> None:
        """Charges one step that goes over `size` characters or items. Raises `TemplateLimitError`."""
        self._steps -= 1 + size // _CHARS_PER_STEP
        if self._steps <= self._next_look:
            self._look()

    def _look(self) -> None:
        if self._steps < 0:
            raise TemplateLimitError("it takes more steps than any chat needs")
        self._next_look = self._steps - _STEPS_BETWEEN_LOOKS
        if time.thread_time() > self._end:
            raise TemplateLimitError(f"it takes more than {_SECONDS:.0f} seconds")

    def take(self, size: int) -> None:
        """Charges for a value of `size` characters or items, at best before it is made."""
        self.take_step(size)
        self._chars -= size
        if self._chars < 0:
            raise TemplateLimitError(TOO_MUCH_TEXT)
        self.allow(size)

    def allow(self, size: int) -> None:
        """Raises `TemplateLimitError` where one value would be of more than `longest` characters or items."""
        if size > self.longest:
            raise TemplateLimitError(TOO_MUCH_TEXT)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget; `begin` starts a new one for this thread."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, **settings: Any):
        self._local = threading.local()
        self.begin(0)
        super().__init__(**settings)
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.globals["namespace"] = _Namespace

    def begin(self, input_size: int) -> Budget:
        """A new budget for what this thread compiles or renders next."""
        self._local.budget = Budget(input_size)
        return self.budget

    @property
    def budget(self) -> Budget:
        """This thread's."""
        found: Budget = self._local.budget
        return found

    def limit_filters(self) -> None:
        """Charges for every filter and test that the environment has by now, and for what it puts out."""
        self.filters.update({name: self._charged(name, function) for name, function in self.filters.items()})
        tests: Mapping[str, Any] = self.tests
        self.tests.update({name: self._charged(name, function, is_test=True) for name, function in tests.items()})
        self.filters |= {_COUNTED: self._counted, _WEIGHED: self._weighed, _BUILT: self._built}
        self.filters |= {_SLICED: self._sliced, _JOINED: self._joined}
        self.finalize = self._finalized

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        hooked: str = super()._generate(_Hooks().visit(source), *args, **kwargs)
        return hooked

    def _charged(self, name: str, function: Callable[..., Any], is_test: bool = False) -> Callable[..., Any]:
        """A filter, or a test."""
        # Jinja passes its context, or the environment, in front of the arguments of some.
        num_passed = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @functools.wraps(function)  # which keeps jinja's note of what is to be passed
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[num_passed:]
            if name in _COMPARING:
                self.budget.take_step(sum(map(self._weight, given)))
            elif is_test or name in _STRUCTURAL or not given:
                self.budget.take_step(sum(map(size_of, given)))
            else:
                # The filter format is the operator, of whatever is put in front of it.
                text, method = (str(given[0]), "%") if name == "format" else (given[0], name)
                self._charge_text(method, text, [*given[1:], *kwargs.values()])
            if name == "sum" and any(isinstance(value, list | tuple) for value in (*given[1:], *kwargs.values())):
                raise TemplateLimitError("it adds lists by the filter sum")
            return self._charged_result(function(*args, **kwargs))

        return call

    def _charge_text(self, name: str, text: Any, others: Sequence[Any]) -> None:
        """Charges for the text that a filter, or a method of a text or number, will make."""
        if name in ("encode", "decode") and any(map(_is_slow_codec, others)):
            raise TemplateLimitError("it uses a text encoding that no chat needs")
        if name in _FORMS and isinstance(text, str | bytes):
            form = _FORMS[name](text if isinstance(text, str) else text.decode("latin-1"))
            size = self._size_formed(text, form, _WRITTEN_NUMBER + max(map(self._weight, others), default=0))
        else:
            size = _size_made(name, text, others, self.budget.weights)
        self.budget.allow(size)
        self.budget.take_step(size)

    def charge_date(self, form: str) -> None:
        """Charges for what `strftime` will make. Raises `TemplateLimitError`."""
        self.budget.take(self._size_formed(form, read_date(form), _WRITTEN_DATE))

    def _size_formed(self, text: str | bytes, form: Form, largest: int) -> int:
        """At least the characters of a form that is filled in with values of at most `largest` characters."""
        if form.reaches:
            raise TemplateLimitError("it formats attributes of values")
        if form.filled > self.budget.longest:
            raise TemplateLimitError("it fills a text up to a width that no chat needs")
        return len(text) + form.filled + form.num_fields * largest

    def _weight(self, value: Any) -> int:
        """Characters of a value that is written out, and what comparing or hashing it goes over."""
        return self.budget.weights.of(value).size

    def _charged_result(self, value: Any) -> Any:
        self.budget.take(size_of(value))
        return _taken(value, self.budget) if isinstance(value, Iterator) else self._built(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox calls, charged. `loop(...)` of a recursive loop goes over its argument."""
        # The sandbox wraps str.format.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        given = [*args, *kwargs.values()]
        weight = sum(map(__self._weight, given))
        __self.budget.allow(weight)  # some keep their arguments as one list
        if isinstance(owner, str | bytes | int):
            __self._charge_text(method.__name__, owner, given)
        elif isinstance(owner, list | tuple | LoopContext):
            # Their methods compare with what they are given.
            __self.budget.take_step(weight + __self._weight(owner))
        else:
            __self.budget.take_step(size_of(owner) + sum(map(__self._hashed_size, given)))
        if isinstance(__obj, LoopContext) and args:
            args = (__self._counted(args[0]), *args[1:])
        return __self._charged_result(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operator, after what it will make is charged."""
        if operator == "%" and isinstance(left, str | bytes):
            self._charge_text("%", left, right if isinstance(right, tuple) else (right,))
        self.budget.take(_size_of_product(operator, left, right))
        return self._built(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The item, after its key is charged, which is hashed each time."""
        self.budget.take_step(self._hashed_size(argument))
        return super().getitem(obj, argument)

    def _hashed_size(self, value: Any) -> int:
        """What hashing goes over: a text remembers its hash, a tuple does not."""
        return self._weight(value) if isinstance(value, tuple) else size_of(value)

    def _counted(self, items: Any) -> Any:
        """`items` for a loop: each turn is charged."""
        return _Counted(items, self.budget) if isinstance(items, Sized) else _steps(items, self.budget)

    def _weighed(self, value: Any) -> Any:
        """`value`, to be compared."""
        self.budget.take_step(self._weight(value))
        return value

    def _built(self, value: Any) -> Any:
        """`value`, which is new, and where it is a container no heavier than the budget allows."""
        self._weight(value)
        return value

    def _sliced(self, value: Any) -> Any:
        """`value`, to be cut."""
        self.budget.take(size_of(value))
        return value

    def _joined(self, parts: Iterable[Any]) -> str:
        """The parts as one text, charged."""
        parts = list(parts)
        self.budget.take(sum(map(self._weight, parts)))
        return "".join(map(str, parts))

    def _finalized(self, value: Any) -> Any:
        """What is put out, before it is text; `concat` charges for texts."""
        if not isinstance(value, str):
            self.budget.take(self._weight(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """What jinja puts the pieces of its output together with."""
        pieces = []
        for piece in parts:
            self.budget.take(len(piece))
            pieces.append(piece)
        return "".join(pieces)


class _Counted:
    """A sized thing to loop over: jinja asks for its length."""

    def __init__(self, items: Any, budget: Budget):
        self._items = items
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _steps(self._items, self._budget)


def _steps(items: Iterable[Any], budget: Budget) -> Iterator[Any]:
    for item in items:
        budget.take_step()
        yield item


def _taken(items: Iterable[Any], budget: Budget) -> Iterator[Any]:
    for item in items:
        budget.take(size_of(item))
        budget.weights.of(item)
        yield item


class _Namespace(Namespace):
    """Jinja's, which templates may change and put into itself: what it holds is not written out."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Hooks(NodeTransformer):
    """Puts filters of a `LimitedEnvironment` into a template, under names that no template can write."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        if any(isinstance(side.expr, nodes.Const) for side in sides) and not _searches(node):
            return node  # as long as the constant is
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = _filtered(side.expr, _WEIGHED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_List(self, node: nodes.List | nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _filtered(node, _BUILT)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        if node.ctx == "load":
            return self.visit_List(node)
        self.generic_visit(node)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _BUILT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, _SLICED)
        return node


_COUNTED, _WEIGHED, _BUILT, _SLICED, _JOINED = "-counted", "-weighed", "-built", "-sliced", "-joined"


def _searches(node: nodes.Compare) -> bool:
    return any(operand.op in ("in", "notin") for operand in node.ops)


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _size_made(name: str, text: Any, others: Sequence[Any], weigh: Weights) -> int:
    """At least the characters of what a filter, or a method, makes of `text` and its other arguments."""
    (own, depth), weights = weigh.of(text), [weigh.of(value).size for value in others]
    numbers = [abs(value) for value in others if isinstance(value, int)]
    widest, most = max(numbers, default=0), max(weights, default=0)
    if name == "replace" and len(others) > 1:
        return own + (text.count(others[0]) if isinstance(text, str | bytes) else own) * weights[1]
    if name == "join":
        lists = text if isinstance(text, list | tuple) else others[0] if others else ()
        separator = most if lists is text else own
        return own + most + separator * size_of(lists)
    if name in ("indent", "expandtabs"):
        return own + (own if isinstance(text, bytes) else _num_lines_and_tabs(text)) * max(widest, most)
    if name in ("tojson", "translate", "wordwrap"):
        return own * (1 + max(widest, most) * max(1, depth))
    return own + sum(weights) + sum(numbers)


def _num_lines_and_tabs(text: Any) -> int:
    return 1 + text.count("\n") + text.count("\t") if isinstance(text, str) else 1


def _is_slow_codec(name: Any) -> bool:
    return isinstance(name, str) and "".join(filter(str.isalnum, name)).lower() in _SLOW_CODECS


def _size_of_product(operator: str, left: Any, right: Any) -> int:
    """At least that of what an operator will give. Raises `TemplateLimitError` for numbers without end."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MOST_BITS:
            raise TemplateLimitError("it computes with numbers of more digits than any chat needs")
        return 0
    if operator == "*":
        count, items = (left, right) if isinstance(left, int) else (right, left)
        return max(0, count) * size_of(items) if isinstance(count, int) else 0
    return size_of(left) + size_of(right)
