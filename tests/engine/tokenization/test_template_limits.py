"""Chat templates that would take all time or all memory, and the budget that ordinary ones never notice."""

from __future__ import annotations

import resource
import time

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.errors import RequestError
from dovetail.engine.tokenization.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello!"}]
TURNS = "{% for i in range(99999) %}{% for j in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"

HOSTILE = {
    "nested ranges": f"{TURNS}{ENDS}",
    "nested ranges with a condition": "{% for i in range(99999) %}{% for j in range(99999) if false %}x" + ENDS,
    "output in nested ranges": f"{TURNS}x{ENDS}",
    "loop variable": "{% for i in range(99999) %}{% for j in range(99999) %}{{ loop.last }}" + ENDS,
    "recursive loop": "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "doubling by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by a macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(x='ab') %}"
    "{% for i in range(60) %}{% set n.x = m(n.x) %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set b %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = b %}{% endfor %}",
    "doubling by join": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "doubling by format": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "a text times a number": "{{ 'x' * 10000000000 }}",
    "a number times a text": "{% set n = 10000000000 %}{{ n * 'x' }}",
    "a list times a number": "{% set n = 10000000000 %}{{ ([0] * n) | length }}",
    "a power": "{% set n = 9 %}{{ n ** (n ** (n ** n)) }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "center": "{{ 'x' | center(9000000000) }}",
    "indent": "{{ 'x\\ny' | indent(9000000000) }}",
    "ljust": "{{ 'x'.ljust(9000000000) }}",
    "width of %": "{{ '%9000000000d' % 1 }}",
    "width of % by an argument": "{{ '%*d' % (9000000000, 1) }}",
    "width of format": "{{ '{:9000000000}'.format(1) }}",
    "width of format by an argument": "{{ '{:{}}'.format(1, 9000000000) }}",
    "width of the format filter": "{{ '%9000000000d' | format(1) }}",
    "width of a date": "{{ strftime_now('%9000000000d') }}",
    "json": "{{ [[1]] | tojson(indent=9000000000) }}",
    "replacing": "{% set x = 'a' * 60000 %}{{ x.replace('a', x) | length }}",
    "the replace filter": "{% set x = 'a' * 60000 %}{{ x | replace('a', x) | length }}",
    "lines": "{% set x = '\\n' * 600000 %}{{ x | indent(9999) | length }}",
    "tabs": "{% set x = '\\t' * 600000 %}{{ x.expandtabs(9999) | length }}",
    "joining": "{% set x = ['a' * 1000000] * 4000 %}{{ ''.join(x) | length }}",
    "the join filter": "{% set x = ['a' * 1000000] * 4000 %}{{ x | join | length }}",
    "joining attributes": "{% set x = [{'c': 'a' * 1000000}] * 4000 %}{{ x | map(attribute='c') | join | length }}",
    "a list as text": "{% set x = ['a' * 1000000] * 4000 %}{{ x }}",
    "a list in a text": "{% set x = ['a' * 1000000] * 4000 %}{{ ('' ~ x) | length }}",
    "a list of lists as text": "{% set n = namespace(x=['ab']) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string | length }}",
    "sums of lists": "{{ ([[1]] * 4000000) | sum(start=[]) | length }}",
    "filling in": "{% set x = 'a' * 1000000 %}{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format(x) | length }}",
    "batch": "{{ [1] | batch(9000000000, 0) | list }}",
    "lists of ranges": "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "sums of ranges": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "comparing": "{% set x = 'a' * 4000000 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "slicing": "{% set x = 'a' * 4000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "printing": "{% set x = 'a' * 4000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "doubling a field that is filled": "{{ ('{0:9999}' * 120000).format(1) | length }}",
    "a form of fields that never end": "{{ ('{' ~ ':' * 1000000).format() }}",
    "a form of keys that never end": "{{ ('%(' * 1000000) % {'x': 1} }}",
    "width of % with a key": "{{ ('%(x)1000000000d' % {'x': 1}) | length }}",
    "width of the format filter with a key": "{{ ('%(x)1000000000d' | format(x=1)) | length }}",
    "width of a list as a form": "{{ ['%(x)1000000000d'] | format(x=1) | length }}",
    "widths of %": "{{ ('%(a)9999d' * 120000 % {'a': 1}) | length }}",
    "width of bytes": "{{ ('%1000000000d'.encode() % 1) | length }}",
    "ljust of bytes": "{{ 'x'.encode().ljust(9000000000) | length }}",
    "bytes of a number": "{{ (1).to_bytes(9000000000, 'big') | length }}",
    "fields by attribute": "{% set n = namespace(x='a' * 4000000) %}{{ ('{0.x}' * 1000).format(n) | length }}",
    "dates": "{{ strftime_now('%c' * 1000000) | length }}",
    "width of a date in two": "{{ strftime_now('%-%z1000000000d') | length }}",
    "an encoding with an insertion sort": "{% set n = namespace(x='') %}{% for i in range(99999) %}"
    "{% set n.x = n.x ~ '%c' % (i + 99999) %}{% endfor %}"
    "{{ n.x.encode('punycode') | length }}",
    "replacing in a list": "{{ (['a' * 60000] | replace('a', 'a' * 60000)) | length }}",
    "json of deep lists": "{% set n = namespace(x=[0] * 40000) %}"
    "{% for i in range(90) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ n.x | tojson(indent=99) | length }}",
    "deep tuples": "{% set n = namespace(x=(1,)) %}{% for i in range(200000) %}{% set n.x = (n.x,) %}{% endfor %}"
    "{{ {n.x: 1} | length }}",
    "hashing in a loop": "{% set t = ((1, 2) * 1000000,) %}{% set d = {} %}"
    "{% for i in range(99999) %}{% if d[t] %}x{% endif %}{% endfor %}",
    "comparing lists in a loop": "{% set a = [[1.5] * 4000000] %}{% set b = [[0.5 + 1] * 4000000] %}"
    "{% for i in range(99999) %}{% if a == b %}x{% endif %}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if true %}" * 500 + "{% endif %}" * 500,
    "deep loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
}
SHARED_LISTS = (
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
SHARED_TUPLES = "{% set n = namespace(a=(1, 2)) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% endfor %}"
HOSTILE |= {
    f"shared lists: {use}": SHARED_LISTS + use
    for use in (
        "{{ n.a == n.b }}",
        "{{ n.a < n.b }}",
        "{{ n.a in [n.b] }}",
        "{{ [n.a, n.b] | sort | length }}",
        "{{ [n.a, n.b] | max | length }}",
        "{{ n.a is eq(n.b) }}",
        "{{ [n.a] | select('equalto', n.b) | list | length }}",
        "{{ [n.a].index(n.b) }}",
        "{% for x in [n.a, n.b] %}{{ loop.changed(x) }}{% endfor %}",
        "{{ [{'k': n.a}, {'k': n.b}] | groupby('k') | list | length }}",
        "{{ n.a | string | length }}",
        "{{ n.a | tojson | length }}",
        "{{ (n.a ~ 'x') | length }}",
        "{{ '{}'.format(n.a) | length }}",
        "{{ ('%s' % n.a) | length }}",
        "{{ n.a | join | length }}",
        "{{ raise_exception(n.a) }}",
    )
}
HOSTILE |= {
    f"shared tuples: {use}": SHARED_TUPLES + use
    for use in (
        "{% set d = {n.a: 1} %}{{ d | length }}",
        "{{ [n.a] | unique | list | length }}",
        "{{ {}.get(n.a) }}",
        "{% set d = {} %}{{ d[n.a] }}",
        "{{ dict([(n.a, 1)]) | length }}",
    )
}
DOUBLED = {
    "dict": ("x=1", "{% set n.x = dict(a=n.x, b=n.x) %}"),
    "dict literal": ("x=1", "{% set n.x = {'a': n.x, 'b': n.x} %}"),
    "views of dicts": ("x=1", "{% set n.x = {'a': n.x, 'b': n.x}.items() %}"),
    "pairs of dicts": ("x=1", "{% set n.x = {'a': n.x, 'b': n.x} | items | list %}"),
    "sums": ("x=[1]", "{% set n.x = [n.x] + [n.x] %}"),
    "products": ("x=[1]", "{% set n.x = [n.x] * 2 %}"),
    "batches": ("x=[1]", "{% set n.x = ([n.x] | batch(2, n.x) | list)[0] %}"),
    "arguments": ("x=[1]", "{% set n.x = cycler(n.x, n.x).items %}"),
    "slices": ("x=[1]", "{% set n.x = [n.x, n.x][:] %}"),
}
"""Ways to put a value into itself twice: what `n.x` is at first, and how it doubles."""
HOSTILE |= {
    f"doubling by {name}": f"{{% set n = namespace({start}) %}}"
    f"{{% for i in range(60) %}}{doubles}{{% endfor %}}{{{{ n.x }}}}"
    for name, (start, doubles) in DOUBLED.items()
}
HOSTILE["doubling by arguments of a macro"] = (
    "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}"
    "{{ m(40) }}"
)


SLOW = ("branching recursion", "lists of ranges", "sums of lists", "comparing lists in a loop")
"""What takes longest to be stopped."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in HOSTILE]
)
def test_a_hostile_template_is_stopped_with_words(name: str) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    with pytest.raises(
        RequestError, match=r"^the chat template (was stopped|refused the messages|is not valid Jinja): ."
    ):
        ChatTemplate(HOSTILE[name]).render(
            MESSAGES, add_generation_prompt=True, continue_final_message=False, variables={}
        )
    assert time.thread_time() - began < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 600_000  # KiB


CHAT = (
    "{%- set ns = namespace(text='', count=0) %}{{- bos_token }}{%- for m in messages if m.content %}"
    "{%- set ns.count = ns.count + loop.index0 * 2 ** 3 %}{%- set ns.text = ns.text ~ m.role ~ ': ' + m.content %}"
    "{{- '<|' + m['role'] + '|>' + m.content | trim }}{%- if loop.last and not (m.role == 'x') %}{{ loop.length }}"
    "{{ '%5d' % ns.count }}{{ 'é' * 3 }}{% endif %}{%- if 'e' in m.content %}{{ m.content[1:3] }}{% endif %}"
    "{% for k, v in m.items() | list %}{{ k }}={{ v | tojson(indent=2) }}{% else %}none{% endfor %}"
    "{%- endfor %}{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(ns.text) | upper | replace('A', 'b') }}"
    "{{ messages | map(attribute='role') | unique | join(',') }}{{ '{:>5}'.format(ns.count) }}"
    "{% for n in [[1, [2]], [3]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}"
    "{{ range(3) | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), min_size=1, max_size=5))
def test_ordinary_templates_render_as_in_transformers(messages: list[dict[str, str]]) -> None:
    oracle = transformers.utils.chat_template_utils.render_jinja_template(
        [messages], chat_template=CHAT, add_generation_prompt=True, bos_token="<s>"
    )[0][0]
    found = ChatTemplate(CHAT).render(
        messages, add_generation_prompt=True, continue_final_message=False, variables={"bos_token": "<s>"}
    )
    assert found == oracle


@pytest.mark.parametrize(
    "expression",
    [
        "('{tools}' ~ m * 50).replace('{tools}', m * 500)",
        "('%s' ~ m * 50) % (m * 500)",
        "('{}' ~ m * 50).format(m * 500)",
        "(m * 50).startswith(m * 500)",
        "(m * 500) | replace('word', 'a longer text ' * 9)",
        "[m * 50, m * 500] | join(m)",
        "m.join([m * 50, m * 500])",
        "1700000000 is gt 1600000000",
        "[{'t': 1700000000}] | selectattr('t', 'gt', 1600000000) | list",
        "'%d %s' % (1700000000, m)",
        "'{} {}'.format(1700000000, m)",
        "(m * 500) | indent(4)",
        "[{'a': [m * 500]}] | tojson(indent=4)",
        "x | default(1700000000)",
        "'%5d|%-8s|%.2f' % (7, m, 0.5)",
        "'{:>5}|{!r:8}|{:,.2f}'.format(7, m, 0.5)",
        "strftime_now('%d %b %Y, %H:%M:%S 100%%')",
        "[messages * 50, messages * 50] == [messages * 50]",
        "{(m, m): messages}[m, m]",
        "m.encode('utf-8') | length",
        "namespace(x=messages)",
    ],
)
def test_large_texts_and_numbers_are_no_attack(expression: str) -> None:
    messages = [{"role": "user", "content": "some words of a chat \n" * 10}]
    source = "{% set m = messages[0].content %}{{ " + expression + " }}"
    ChatTemplate(source).render(messages, add_generation_prompt=True, continue_final_message=False, variables={})


def test_a_long_chat_stays_within_the_budget() -> None:
    messages = [{"role": "user", "content": "word " * 400}] * 2000
    source = "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + m.content %}{% endfor %}{{ n.t }}"
    text = ChatTemplate(source).render(messages, add_generation_prompt=True, continue_final_message=False, variables={})
    assert len(text) == 2000 * 2000


def test_a_namespace_that_holds_itself_is_written_out_as_a_name() -> None:
    source = "{% set n = namespace() %}{% set n.x = [n, n] %}{{ n }}{{ n.x }}"
    text = ChatTemplate(source).render(MESSAGES, add_generation_prompt=True, continue_final_message=False, variables={})
    assert text == "<Namespace>[<Namespace>, <Namespace>]"
