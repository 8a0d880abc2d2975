#!/usr/bin/env python3
"""Records what Hugging Face's template environment prints for small templates, one feature each.

    record_templates.py > tests/fixtures/templates/features.jsonl

Lines: {"template", "text"} or {"template", "error"}, all over the context of the first line. Needs transformers.
"""
import datetime
import json

import transformers.utils.chat_template_utils as hf


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 15, 12, 0, 0)


hf.datetime = Frozen

CONTEXT = {
    "messages": [
        {"role": "system", "content": "  Be terse.\n"},
        {"role": "user", "content": "Hello <b>&'\"</b> é 😀"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer", "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1.0, "a": [True, None, "x"]}}}]},
        {"role": "tool", "content": "21"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"q": {"type": "string", "items": {"k": 1}, "keys": 2}}, "required": ["q"]}}}],
    "empty": [], "none": None, "yes": True, "no": False, "n": 3, "big": 123456789012345678901234567890, "f": 1e20, "small": 0.00001, "pi": 3.14159,
    "word": "straße x", "s": "a,b,,c", "spaced": "  a  b\tc\n ", "d": {"b": 2, "a": {"x": [1, 2.5, "it's"]}, "get": 7}, "list": [3, 1, 2], "words": ["bb", "a", "CC"],
    "add_generation_prompt": True,
}

TEMPLATES = r'''
{{ d | tojson }}|{{ d | tojson(indent=2) }}|{{ d | tojson(sort_keys=true, separators=(',', ':')) }}|{{ d|tojson(indent=4, ensure_ascii=False) }}
{{ word | tojson(ensure_ascii=True) }}{{ "\x7f" | tojson }}{{ messages[1].content | tojson }}
{{ big | tojson }} {{ f | tojson }} {{ small | tojson }} {{ pi | tojson }} {{ yes|tojson }} {{ none|tojson }} {{ empty|tojson }} {{ {}|tojson(indent=2) }}
{{ list|tojson(indent='\t') }}{{ [1,(2,3)]|tojson }}{{ {'k': 1, 2: 3, none: 4, true: 5} | tojson }}
{{ undefined_thing | tojson }}
{{ yes }} {{ none }} {{ n }} {{ big }} {{ f }} {{ small }} {{ 1.0 }} {{ 0.1 + 0.2 }} {{ 10 / 2 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ -7 // 2 }}
{{ d }} {{ list }} {{ (1, 'a') }} {{ ('x',) }} {{ words }} {{ [none, true] }} {{ messages[3] }}
{{ 'a' ~ 1 ~ none ~ true ~ 1.5 ~ list ~ d }}
{{ missing }}|{{ missing is defined }}|{{ missing | default('x') }}|{{ none | default('x') }}|{{ none | default('x', true) }}|{{ '' | d('y', true) }}
{{ missing.attribute }}
{{ messages[0].nothing }}|{{ messages[9] }}|{{ d.zzz is undefined }}
{{ 'a' + 1 }}
{{ 'a' + none }}
{{ 'a' + missing }}
{{ spaced.strip() }}|{{ spaced.lstrip() }}|{{ spaced.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcba'.lstrip('ab') }}|{{ spaced | trim }}|{{ 'xax' | trim('x') }}
{{ s.split(',') }}|{{ s.split(',', 1) }}|{{ spaced.split() }}|{{ 'a b c'.split(None, 1) }}|{{ s.rsplit(',', 1) }}|{{ s.split(',')[-1] }}|{{ 'a--b'.split('--', maxsplit=1) }}|{{ ''.split() }}|{{ ''.split(',') }}|{{ ' a b '.rsplit(None, 1) }}
{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}|{{ messages[2].content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') }}
{{ 'aXbX'.replace('X', '-') }}|{{ 'aXbX'.replace('X', '-', 1) }}|{{ 'ab'.replace('', '.') }}|{{ 'abc' | replace('b', 'B') }}
{{ word.upper() }}|{{ word.title() }}|{{ 'HELLO wORLD'.capitalize() }}|{{ 'They are Bill\'s'.title() }}|{{ 'aB'.swapcase() }}|{{ 'x1y'.title() }}|{{ 'ABC'.lower() }}|{{ 'abc' | upper }}|{{ 'hello world' | title }}|{{ 'hello' | capitalize }}
{{ ', '.join(words) }}|{{ words | join('/') }}|{{ [1, 2] | join('-') }}|{{ messages | map(attribute='role') | join(',') }}
{{ ','.join([1]) }}
{{ 'hello'.startswith('he') }}|{{ 'hello'.startswith(('x', 'he')) }}|{{ 'hello'.endswith(('lo', 'x')) }}|{{ 'hello'.endswith('') }}|{{ 'abc'.startswith('b', 1) }}
{{ 'hello'.startswith(['he']) }}
{{ 'hello'.find('l') }}|{{ 'hello'.rfind('l') }}|{{ 'hello'.find('z') }}|{{ 'héllo'.index('l') }}|{{ 'hello'.count('l') }}|{{ 'abc'.partition('b') }}|{{ 'abc'.rpartition('z') }}
{{ 'hello'.isdigit() }}|{{ '12'.isdigit() }}|{{ 'abc'.isalpha() }}|{{ 'a1'.isalnum() }}|{{ ' \t'.isspace() }}|{{ 'ABC'.isupper() }}|{{ 'abc'.islower() }}
{{ 'prefix-x'.removeprefix('prefix-') }}|{{ 'x.txt'.removesuffix('.txt') }}|{{ 'x'.ljust(3) }}|{{ 'x'.rjust(3, '.') }}|{{ 'x'.center(4) }}|{{ '-7'.zfill(4) }}
{{ 'a\nb\r\nc'.splitlines() }}|{{ 'a\n'.splitlines(true) }}
{{ '%s-%d' % ('a', 3) }}
{{ '{} and {x}'.format(1, x=2) }}|{{ "%s" | format('x') }}|{{ '%05.2f' | format(3.14159) }}
{{ d.get('b') }}|{{ d.get('zz') }}|{{ d.get('zz', 'dflt') }}|{{ d['get'] }}|{{ d.keys() | list }}|{{ d.values() | list }}|{{ d.items() | list }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}|{% for k, v in d | items %}{{ k }};{% endfor %}|{% for k, v in d | dictsort %}{{ k }};{% endfor %}|{% for k in d %}{{ k }}{% endfor %}
{{ tools[0].function.parameters.properties.q['items'] }}|{{ tools[0].function.parameters.properties.q.items() | list | length }}|{{ 'keys' in tools[0].function.parameters.properties.q }}
{{ d.pop('b') }}
{{ list.append(4) }}
{{ list.index(1) }}|{{ list.count(3) }}|{{ list | sort }}|{{ list | sort(reverse=true) }}|{{ words | sort }}|{{ words | sort(case_sensitive=true) }}|{{ list | sum }}|{{ list | min }}|{{ list | max }}|{{ list | reverse | list }}|{{ [1,1,2] | unique | list }}
{{ list[::-1] }}|{{ list[1:] }}|{{ list[:-1] }}|{{ list[-1] }}|{{ 'hello'[1:3] }}|{{ 'hello'[::-1] }}|{{ 'hello'[-1] }}|{{ 'héllo'[1] }}|{{ list[::2] }}|{{ list[5:] }}
{{ range(3) | list }}|{{ range(1, 4) | list }}|{{ range(3, -1, -1) | list }}|{{ range(0, 10, 3) | list }}
{% for m in messages[::-1] %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ m.role[0] }} {% endfor %}
{% for m in messages %}{% if loop.previtem is defined %}{{ loop.previtem.role }}{% endif %}>{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %};{% endfor %}
{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% endfor %}|{% for x in empty %}x{% else %}none{% endfor %}|{% for x in list if x > 1 %}{{ x }}{% endfor %}
{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}
{% set ns = namespace(found=false, n=0) %}{% for x in list %}{% set ns.n = ns.n + x %}{% set ns.found = true %}{% endfor %}{{ ns.n }}{{ ns.found }}
{% set x = 1 %}{% for y in list %}{% set x = 5 %}{% endfor %}{{ x }}
{% if true %}{% set x = 5 %}{% endif %}{{ x }}
{% macro m(a, b='x', c=none) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, 2) }}|{{ m(1, c=3) }}|{{ m('a', b='b') }}|{{ m() }}
{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}|{% macro w() %}[{{ caller() }}]{% endmacro %}{% call w() %}in{% endcall %}
{% set text %}block {{ n }}{% endset %}{{ text }}|{{ text | length }}|{% filter upper %}abc{% endfilter %}|{% raw %}{{ raw }}{% endraw %}|{# comment #}x
{{ 'x' if yes else 'y' }}|{{ 'x' if no }}|{{ not no }}|{{ yes and n }}|{{ no or 'z' }}|{{ '' or none }}|{{ n > 2 and n < 5 }}|{{ 1 < n < 5 }}
{{ 1 in list }}|{{ 'b' in d }}|{{ 'ell' in 'hello' }}|{{ 4 not in list }}|{{ 'x' in none }}
{{ 'ell' in 'hello' }}|{{ [1,2] == [1,2] }}|{{ 1 == 1.0 }}|{{ '1' == 1 }}|{{ none == false }}|{{ true == 1 }}|{{ {'a':1} == {'a':1} }}
{{ messages is iterable }}{{ 'a' is iterable }}{{ n is iterable }}{{ d is iterable }}{{ none is iterable }}|{{ messages is sequence }}{{ 'a' is sequence }}{{ d is sequence }}{{ n is sequence }}
{{ d is mapping }}{{ list is mapping }}{{ 'a' is string }}{{ n is string }}{{ n is number }}{{ yes is number }}{{ 1.5 is float }}{{ n is integer }}{{ yes is integer }}{{ yes is boolean }}{{ none is none }}{{ yes is true }}{{ n is true }}{{ no is false }}
{{ n is odd }}{{ n is even }}{{ n is divisibleby(3) }}{{ n is eq(3) }}{{ n is equalto 3 }}{{ n is ne 3 }}{{ n is gt 2 }}{{ n is in list }}{{ 'A' is upper }}{{ 'a' is lower }}{{ d is sameas d }}{{ range is callable }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | list }}|{{ list | select('odd') | list }}|{{ list | reject('equalto', 3) | list }}|{{ messages | selectattr('tool_calls', 'defined') | list | length }}|{{ messages | selectattr('tool_calls') | list | length }}
{{ list | first }}|{{ list | last }}|{{ 'abc' | first }}|{{ 'abc' | last }}|{{ empty | first }}|{{ 'abc' | length }}|{{ d | length }}|{{ list | count }}|{{ 'abc' | list }}|{{ words | map('upper') | list }}
{{ '3' | int + 1 }}|{{ 'x' | int }}|{{ 'x' | int(5) }}|{{ '1.5' | float }}|{{ 3.7 | int }}|{{ 2.5 | round }}|{{ 2.567 | round(2) }}|{{ -3 | abs }}|{{ n | string + 'x' }}|{{ f | string }}|{{ small | string }}|{{ none | string }}|{{ d | string }}
{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(1, first=true, blank=true) }}|{{ 'a b c' | wordcount }}
{{ [1,2,3,4,5] | batch(2) | list }}|{{ [1,2,3] | slice(2) | list }}|{{ words | groupby('0') | list | length }}|{{ '<a>' | escape }}|{{ '<a>' | safe }}|{{ '<a&\'">' | e }}
{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now('%A, %B %-d, %H:%M:%S %p %j %y %m') }}
{{ raise_exception('no ' ~ n) }}
{% generation %}inside{% endgeneration %}|{%- generation -%}  x  {%- endgeneration -%}|{% set q = 1 %}{% generation %}{% set q = 2 %}{{ q }}{% endgeneration %}{{ q }}
{{ "esc \t \" \\ \u00e9 \x41 \101" }}|{{ 'it''s' }}|{{ 'adjacent' 'strings' }}
{{ dict(a=1, b=2) }}|{{ dict([('x', 1)]) }}|{{ {'a': 1, 'a': 2} }}|{{ {**d} }}
{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}
{% with a = 1 %}{{ a }}{% endwith %}{{ a is defined }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}|{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}|{% set (c, e) = (5, 6) %}{{ c }}
{{ messages | length - 1 }}|{{ (messages | length) - 1 }}|{{ -n }}|{{ 2 * 3 + 4 }}|{{ 'ab' * 2 }}|{{ [1] + [2] }}|{{ [1] * 2 }}|{{ 1_000 }}|{{ 1e3 }}
{{ messages[2].tool_calls[0].function.arguments | tojson }}|{{ messages[2]['tool_calls'][0]['function']['arguments'].items() | list }}
{{ namespace(a=1).a }}
{{ joiner(', ')() }}|{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}
{{ 'a' is not none }}|{{ n is not defined }}|{{ not (n is string) }}|{{ (n is string) is false }}
{{ 'x'.__class__ }}|{{ d.b }}|{{ d['a']['x'][1] }}|{{ d.a.x[2] }}
{{ list | map('string') | join(',') }}|{{ words | map('length') | list }}|{{ messages | map(attribute='name', default='-') | list }}|{{ d | map('upper') | list }}
{{ +n }}
{{ 'Hello' | lower }}|{{ 'a-b' | replace('-', '') | upper }}|{{ 'ab' | center(6) }}|{{ 'abc' | center(6) }}|{{ ' a b' | wordcount }}
{{ 'abcdef' | truncate(4, true, '') }}
{{ [[1, 2], [3]] | sum(start=[]) }}
{{ 1 if missing else 2 }}|{% if missing %}a{% else %}b{% endif %}|{% for x in missing %}x{% endfor %}|{{ missing | length }}|{{ missing == none }}|{{ missing | list }}
{{ missing() }}
{{ 'ß'.upper() }}|{{ 'İ'.lower() | length }}|{{ 'ﬁ'.upper() }}|{{ 'ΑΣ'.lower() }}|{{ '\u00a0x\u001f'.strip() }}
{{ d | attr('b') }}|{{ messages | map(attribute='tool_calls.0.function.name', default='-') | list }}|{{ messages | map(attribute='content') | map('length') | list }}
{{ d | dictsort(by='key', reverse=true) }}
{{ {'b': 1, 'A': 2, 'c': 0} | dictsort }}
{{ {'b': 1, 'a': 2} | dictsort(by='value') }}
{{ {'b': 1, 'A': 2} | dictsort(true) }}
{{ [{'n': 1, 'g': 'x'}, {'n': 2, 'g': 'y'}, {'n': 3, 'g': 'x'}] | sum(attribute='n') }}|{% for g, items in [{'n': 1, 'g': 'x'}, {'n': 2, 'g': 'y'}, {'n': 3, 'g': 'x'}] | groupby('g') %}{{ g }}:{{ items | map(attribute='n') | join(',') }};{% endfor %}
{{ [{'n': 3}, {'n': 1}] | sort(attribute='n') }}
{{ [{'n': 3}, {'n': 1}] | max(attribute='n') }}
{{ ['b', 'A', 'a'] | unique | list }}
{{ ['b', 'A', 'a'] | unique(true) | list }}
{{ ['b', 'A'] | sort(true, true) }}
{% macro m() %}{{ varargs }}{{ kwargs }}{{ m.name }}{% endmacro %}{{ m(1, 2, x=3) }}
{% macro outer(items) %}{% for i in items %}{{ caller(i) }}{% endfor %}{% endmacro %}{% call(i) outer([1, 2]) %}<{{ i }}>{% endcall %}
{% macro a(x, y=x) %}{{ x }}{{ y }}{% endmacro %}{{ a(1) }}
{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}@{{ loop.depth }}{% endif %}{% endfor %}
{% for a in [1, 2] %}{% for b in 'xy' %}{{ loop.parent is defined }}{{ loop.index }}{% endfor %}{% set outer = loop %}{{ outer.index }}{% endfor %}
{% for k, v in {'a': 1, 'b': [1, 2]}.items() if v is number %}{{ k }}{{ v }}{% else %}-{% endfor %}|{% for i in range(5) if i % 2 %}{{ i }}{{ loop.last }}{% endfor %}
{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}{% set ns.c %}block{% endset %}{{ ns.c }}|{{ ns['a'] }}
{% set x | upper %}abc{% endset %}{{ x }}|{% filter replace('a', 'b') | upper %}aXa{% endfilter %}
{{ '{:>5}|{:<4}|{:^5}|{:05.1f}'.format('a', 'b', 'c', 3.14159) }}
{{ '{!r}'.format('q') }}
{{ '{:,}'.format(1234567) }}
{{ 'abc'.encode() }}
{{ 'a,b'.split(',', maxsplit=0) }}|{{ 'a b  c'.split(' ') }}|{{ 'a\x1cb'.splitlines() }}|{{ 'a\x0bb\x85c\u2028d'.splitlines() }}|{{ 'aXXb'.split('XX', -1) }}
{{ 'a\u00a0b\x1fc'.split() }}
{{ 'Ab'.casefold() }}
{{ 'ab'.index('b') }}
{{ 'tTt'.title() }}
{{ 'x'.isidentifier() }}
{{ 'a\tb'.expandtabs(4) }}
{{ 'abc'.find('c', 1) }}
{{ 'abcabc'.rfind('a', 0, 3) }}
{{ 'aaa'.count('a', 1) }}
{{ 'abc'.endswith('b', 0, 2) }}
{{ 'ab'.isnumeric() }}
{{ 'Ab Cd'.istitle() }}
{{ 'é'.isascii() }}
{{ '²'.isdigit() }}
{{ '½'.isnumeric() }}
{{ '٣'.isdecimal() }}
{{ d.copy() }}|{{ d.update({'z': 1}) }}
{{ d.setdefault('b', 3) }}|{{ d.fromkeys(['a']) }}
{{ list.extend([9]) }}|{{ list }}|{{ list.insert(0, 7) }}|{{ list }}
{{ list.pop() }}|{{ list }}
{{ 5 | filesizeformat }}
{{ {'a': 1} | items | list }}|{{ {'a': 1} | list }}|{{ [('a', 1)] | first }}|{{ 'x' | list | tojson }}|{{ d | length }}|{{ {} | length }}
{{ 10 // 3 }}|{{ -10 // 3 }}|{{ -10 % 3 }}|{{ 10 / 4 }}|{{ 2 ** -1 }}|{{ 2 ** 0.5 }}|{{ 7.5 // 2 }}|{{ 7.5 % 2 }}|{{ 1 / 3 }}|{{ 100000000000000000000 + 1 }}|{{ 9007199254740993 * 3 }}|{{ 1e16 + 1 }}|{{ 5 - 7.0 }}
{{ 1 / 0 }}
{{ 3 > 2.5 }}|{{ 'a' < 'b' }}|{{ [1, 2] < [1, 3] }}|{{ 1 is gt 0 }}|{{ 'a' in ('a', 'b') }}|{{ 1 in {1: 2} }}|{{ none in [none] }}|{{ true + true }}|{{ 'x' * 0 }}|{{ [0] * 2 + [1] }}
{{ 3.0 | int }}
{{ '0x1f' | int(0, 16) }}
{{ '077' | int }}
{{ '1e3' | float }}
{{ 'nan' | float }}
{{ 2.5 | round }}
{{ 3.5 | round }}
{{ 2.567 | round(1, 'floor') }}
{{ 42.55 | round(1, 'ceil') }}
{{ 7 | round }}
{{ ' x ' | trim | length }}
{{ 'a b' | urlencode }}
{{ '<p>a</p> b' | striptags }}
{{ 'hello world foo' | wordwrap(5) }}
{{ 'x' | indent(2, first=true) }}
{{ 'x' is filter }}|{{ 'upper' is filter }}|{{ 'defined' is test }}|{{ missing is undefined }}|{{ d.b is defined }}|{{ d['zz'] is defined }}|{{ none is undefined }}
{{ messages[-1].role }}|{{ messages[0]['role'] }}|{{ messages[1:][0].role }}|{{ messages[-2:] | length }}|{{ messages[:1][0].role }}|{{ (messages | last).role }}|{{ messages[5:] }}|{{ 'abc'[-2:] }}|{{ 'abc'[:99] }}|{{ 'abc'[::2] }}|{{ list[-1:0:-1] }}
{{ 'a' if missing is defined else 'b' }}|{{ missing | default(none) }}|{{ (missing | default({})).x is defined }}|{{ d.b | default(0) + 1 }}|{{ '' | default('e') }}|{{ false | default('e', true) }}
{{ missing + 1 }}
{{ missing.x.y }}
{{ undefined_function('x') }}
{{ none.x }}
{{ none | upper }}|{{ 5 | upper }}|{{ true | lower }}|{{ [1] | upper }}
{{ "a" "b" 'c' }}|{{ 'tab\there' }}|{{ 'nl\nx' }}|{{ 'bs\\' }}|{{ "q\"q" }}|{{ '\'' }}|{{ '\u00e9\U0001F600' }}|{{ '\q' }}
{{ dict(d, c=3) }}|{{ dict() }}|{{ dict({'a': 1}, **{'b': 2}) }}
{% if not tools %}a{% elif tools is sequence and tools | length > 0 and tools[0].function is defined %}b{% else %}c{% endif %}|{% if n == 3 and not (no or none) %}x{% endif %}
{{ range is defined }}|{{ dict is defined }}|{{ loop is defined }}
{% set s = [] %}{% for m in messages %}{% set _ = s.append(m.role) %}{% endfor %}{{ s | join(',') }}
{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.l }}|{{ ns.l | tojson }}
{{ tools | map(attribute='function') | map(attribute='name') | list | tojson }}|{{ tools | selectattr('type', '==', 'function') | list | length }}|{{ messages | selectattr('role', 'in', ('user', 'tool')) | map(attribute='role') | join }}
{{ messages | rejectattr('role', 'equalto', 'system') | first | attr('role') }}|{{ messages | map('tojson') | first | length }}|{{ [3, none, 'a'] | map('string') | list }}|{{ ['a', 'b'] | map('replace', 'a', 'c') | list }}
{{ d | tojson(indent=2) | indent(4) }}|{{ [] | tojson(indent=2) }}|{{ {'a': {}} | tojson(indent=1) }}|{{ [[], [1]] | tojson(indent=1) }}
{{ 'é"\\/\b\f\n\r\t\u2028\x7f😀' | tojson }}|{{ 'é😀' | tojson(ensure_ascii=true) }}|{{ 1e400 | tojson }}|{{ {1.5: 2, false: 3} | tojson }}
{{ 'x'.join('abc') }}|{{ ''.join([]) }}|{{ '-'.join({'a': 1, 'b': 2}) }}|{{ '-'.join(['a'] + ['b']) }}
{{ '%d items, %.2f, %5s|%-5s|%x' | format(3, 2.5, 'a', 'b', 255) }}
{{ words | join(', ') | tojson }}|{{ (list | map('int') | list) | tojson }}|{{ ({'t': (1, 2)}) | tojson }}|{{ d.items() | list | tojson }}
'''
WHITESPACE = [
    "{% if true %}\n  a\n{% endif %}\nb\n",
    "  {% if true %}\n  a\n  {% endif %}\n  b\n\n",
    "x {%- if true -%} \n a \n {%- endif -%} y",
    "a\n  {#- c -#}\n b\n{# d #}\nc",
    "{{ 1 }}\n{{ 2 }}\n\n{{- 3 -}}\n\n{{ 4 }}",
    "  {%+ if true %}x{% endif %}\n",
    "{% for x in list %}\n{{ x }}\n{% endfor %}\n",
    "{%- for x in list %}\n    {{- x }}\n{%- endfor %}\n",
    "a\r\nb\r\n{% if true %}\r\nc\r\n{% endif %}\r\nd",
    "\n\n{% set x = 1 %}\n\n{{ x }}\n",
    "{% raw %}\n{% x %}\n{% endraw %}\n",
    "{% raw %}{% x %}\n{% endraw %}\nz",
    "\t{% if true %}\n\tz\n\t{% endif %}",
    "{{ 'a' }}  \n  {{ 'b' }}  {% if 1 %}  c{% endif %}  \n",
    "{% macro m() %}\n  in\n{% endmacro %}\n{{ m() }}|",
    "{%- if tools %}\n    {{- 'T\\n' }}\n{%- else %}\n    {{- 'N' }}\n{%- endif %}\n",
]


def main():
    print(json.dumps({"context": CONTEXT}))
    for template in [line for line in TEMPLATES.split("\n") if line] + WHITESPACE:
        line = {"template": template}
        try:
            line["text"] = hf._compile_jinja_template(template).render(**json.loads(json.dumps(CONTEXT)))
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(line))


main()
