"""Writes semantics.json: the outputs of Jinja2 for templates about markup, generators, unknown filters, escapes in strings
and attributes: hand-written ones, and random ones from the same parts.

Run in this folder with the Python of an engine (test/tools/install.sh engines): python semantics_gen.py [RANDOM [SEED [FILE]]]
"""

import copy
import json
import random
import re
import sys
import warnings

from jinja_gen import VARS
from transformers.utils.chat_template_utils import _compile_jinja_template

warnings.simplefilter("ignore")
VARS = {
    **VARS,
    "h": "<a> & 'b' \"c\"",
    "rows": [{"k": "x", "v": 1}, {"k": "y", "v": None}, {"k": "<z>"}, {"v": 4}],
    "dunder": {"__class__": "c", "_x": "u", "keys": "k", "get": 1, "__foo__": 2},
}
VARS["d"] = {**VARS["d"], "keys": "shadow"}

MARKUP = r"""
h|safe + '<'
'<' + h|safe
'<' + (h|safe)
(h|safe) + '<'
(h|safe) + h|e
h|e
h|escape|e
h|e|escape
[h|safe, h|e, '<']
{h|safe: 1}
{'a'|safe: 1, 'a': 2}
{'a'|safe: 1}['a']
{'a': 1}['a'|safe]
'a'|safe in {'a': 1}
none|safe
[1, '<']|safe
missing|safe
5|safe + '<'
missing|e
none|e
[1, '<']|e
(h|safe) * 2
2 * (h|safe) + '<'
(h|safe) ~ '<'
'<' ~ (h|safe) + '<'
(h|safe) == h
h == (h|safe)
(h|safe) < 'b'
'a' < (h|safe)
'a' in (h|safe)
('a'|safe) in h
'<b>' in ['<b>'|safe]
(h|safe)[0] + '<'
(h|safe)[-1] + '<'
(h|safe)[1:3] + '<'
(h|safe)[::-1] + '<'
(h|safe)|first + '<'
(h|safe)|last + '<'
((h|safe)|first) + '<'
((h|safe)|last) + '<'
((h|safe)|reverse) + '<'
(h|safe)|list
(h|safe)|upper + '<'
((h|safe)|upper) + '<'
((h|safe)|lower) + '<'
((h|safe)|capitalize) + '<'
((h|safe)|title) + '<'
((h|safe)|trim) + '<'
((h|safe)|replace('<', '{')) + '<'
((h|safe)|string) + '<'
((h|safe)|indent) + '<'
(('a\nb'|safe)|indent(2, true)) + '<'
((h|safe)|default('x')) + '<'
(missing|default('<'|safe)) + '<'
((h|safe)|tojson) + '<'
((h|safe)|length)
((h|safe)|int)
('5'|safe)|int + 1
('5.5'|safe)|float + 1
['<', '>'|safe]|join('&')
['<', '>'|safe]|join('&'|safe)
(['<', '>'|safe]|join('&'|safe)) + '<'
['<', '>'|safe]|map('upper')|list
['<', '>'|safe]|map('escape')|list
['<', '>'|safe]|map('e')|join
['<', '>']|map('safe')|list
['<', '<'|safe]|unique|list
['b', 'a'|safe, 'B'|safe]|sort
['b', 'a'|safe]|max
['b', 'a'|safe]|min
['<'|safe, '>']|first + '<'
['<'|safe]|select('escaped')|list
['<'|safe, '<']|select('eq', '<')|list
['<'|safe, '<']|select('string')|list
h is escaped
(h|safe) is escaped
(h|safe) is string
(h|safe) is iterable
(h|safe) is sequence
('a'|safe) is in ['a']
('a'|safe) is eq 'a'
(h|safe).upper() + '<'
(h|safe).lower() + '<'
(h|safe).title() + '<'
(h|safe).capitalize() + '<'
(h|safe).strip('<') + '<'
(h|safe).lstrip('<') + '<'
(h|safe).rstrip('"') + '<'
(h|safe).replace('a', '<') + '<'
(h|safe).replace('<', '>'|safe) + '<'
(h|safe).split(' ')
(h|safe).split()[0] + '<'
(h|safe).rsplit(' ', 1)
('a\nb'|safe).splitlines()
(h|safe).removeprefix('<') + '<'
(h|safe).removesuffix('"') + '<'
(h|safe).join(['<', 1, '>'|safe, none])
'<'.join(['<', '>'|safe])
('<'.join(['>'|safe])) + '<'
(h|safe).find('&')
(h|safe).index('&')
(h|safe).count('<')
(h|safe).startswith('<a')
(h|safe).startswith('<'|safe)
h.startswith('<'|safe)
h.replace('<'|safe, '>'|safe) + '<'
h.split('&'|safe)
(h|safe).format('<')
('<{}>'|safe).format('<')
('<{}>'|safe).format('<'|safe)
'<{}>'.format('<'|safe) + '<'
('<%s>'|safe) % '<'
('<%s>'|safe) % ('<'|safe)
('<%s%s>'|safe) % ('<', '>'|safe)
('<%s>'|safe) % [1, '<']
('<%x>'|safe) % 255
('<>'|safe) % [1]
('<>'|safe) % {}
('<>'|safe) % 1
'<>' % [1]
'<>' % 1
'<%s>' % missing
('<%s>'|safe) % missing
'<%s>' % ('<'|safe) + '<'
('<%s>'|safe)|format('<') + '<'
('<%s>'|safe|format('<')) + '<'
'<%s>'|format('<'|safe) + '<'
(h|safe) + 1
1 + (h|safe)
(h|safe) + none
(h|safe) + missing
(h|safe) - 1
(h|safe) / 2
(h|safe).__html__ is defined
(h|safe).upper is defined
(h|safe)['upper']() + '<'
(h|safe) and '<'
not (h|safe)
(''|safe) or 'x'
namespace(a=h|safe).a + '<'
dict(a=h|safe)
range(2)|join('<'|safe) + '<'
[{'a': '<'|safe}]|map(attribute='a'|safe)|list
[{'a': 1}]|selectattr('a'|safe, 'eq'|safe, 1)|list
['a']|map('upper'|safe)|list
['<']|map('default', 'x'|safe)|list
[missing]|map('default', '<'|safe)|list
{'b'|safe: '<'|safe}|dictsort
{'b'|safe: '<'|safe}|items|list
{'b'|safe: '<'|safe}|tojson
[h|safe]|tojson
{'b'|safe: '<'|safe}.b + '<'
h|upper|safe|string|e
(h|safe)|xmlattr is defined if no else 1
raise_exception('a'|safe)
""".strip().split("\n")

# A pass over these expressions may or may not read all of their items.
LAZY = r"""
mixed|map('upper')|first
['a', 1, 2]|map('upper')|first
['a', none.x]|first
[1, 2, 3]|select('odd')|first
[3, 'a']|select('odd')|first
[3, 'a']|map('abs')|first
[3, 'a']|map('abs')|list
3 in [3, 'a']|map('abs')
4 in [3, 4, 'a']|map('abs')
5 in [3, 4]|map('abs')
'a' not in ['a', 1]|map('upper')|map('lower')
rows|selectattr('v', 'gt', 0)|first
rows|selectattr('v', 'gt', 0)|list
rows|map(attribute='v')|select('defined')|list
rows|map(attribute='k', default='-')|list
rows|rejectattr('v')|map(attribute='k')|list
[1, [2]]|unique|first
[1, [2]]|unique|list
none|map('upper')|list
0|select('odd')|list
false|map('x')|list
missing|map('upper')|list
missing|select('odd')|list
missing|unique|list
none|unique|list
missing|items|list
none|items|list
'x' if none|items else 'y'
'x' if []|map('upper') else 'y'
[]|map('nosuch')|list
[]|select('nosuch')|list
[]|selectattr()|list
[1]|selectattr()|list
[1]|map()|list
[1]|map('nosuch')|first
'x' if [1]|map('nosuch') else 'y'
l|map('string')|reverse
l|reverse|list
l|map('string')|reverse|join
l|map('string')|last
l|reverse|last
l|map('string')|length
l|select('odd')|sort
l|select('odd')|max
l|select('odd')|join('-')
l|map('string')|map('upper')|map('length')|list
l|map('string') is iterable
l|map('string') is sequence
l|map('string') is mapping
(l|map('string'))[0] is defined
(l|map('string')).send is defined if no else 1
(l|select('odd'))[1:] is defined
l|map('string') == l|map('string')
dict([('a', 1)]|map('list'))
words|unique|list
words|unique(true)|list
words|map('unique')|map('list')|list
range(5)|select('odd')|list
range(5)|reverse|list
d|reverse|list
d.items()|reverse|list
missing|reverse|list
none|reverse
'abc'|reverse
d|items|map('first')|list
d|dictsort|map('last')|list
cycle
loop
[l|map('string')]|length
[range(3)|map('string')]|map('join')|list
""".strip().split("\n")

LOOPS = r"""
{% set ns = namespace(done=false) %}{% for m in messages if not ns.done %}{{ m.role }};{% set ns.done = true %}{% endfor %}
{% set ns = namespace(n=0) %}{% for x in range(9) if ns.n < 3 %}{{ x }}{% set ns.n = ns.n + x %}{% else %}none{% endfor %}
{% set ns = namespace(n=0) %}{% for x in range(9) if ns.n < 3 %}{{ loop.length }}{{ x }}{% set ns.n = ns.n + x %}{% endfor %}
{% set ns = namespace(n=0) %}{% for x in range(9) if ns.n < 3 %}{{ x }}{{ loop.last }}{{ loop.nextitem }}{% set ns.n = ns.n + x %}{% endfor %}
{% set ns = namespace(n=0) %}{% for x in range(9) if ns.n < 3 %}{{ x }}{% set ns.n = ns.n + x %}{{ loop.last }}{{ loop.revindex }}{{ loop.revindex0 }}{% endfor %}
{% for x in [1, 0, 2] if 1 / x %}{{ x }}{% break %}{% endfor %}
{% for x in [1, 0, 2] if 1 / x %}{{ x }}{% endfor %}
{% for x in [1, 0, 2] if 1 / x %}{{ loop.last }}{% break %}{% endfor %}
{% for x in [1, 0, 2] if 1 / x %}{{ loop.first }}{{ loop.index }}{% break %}{% endfor %}
{% for x in [1, 2, 3, 0] if 1 / x %}{{ loop.nextitem }}{{ loop.previtem }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}
{% for x in ['a', 'b', 1]|map('upper') %}{{ x }}{% if x == 'B' %}{% break %}{% endif %}{% endfor %}
{% for x in [3, 'a']|map('abs') %}{{ x }}{% break %}{% endfor %}
{% for x in [3, 'a']|map('abs') %}{{ x }}{{ loop.last }}{% break %}{% endfor %}
{% for x in [3, 'a']|map('abs') %}{{ x }}{{ loop.length }}{% break %}{% endfor %}
{% for x in l|select('odd') %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
{% for x in l|select('gt', 9) %}x{% else %}none{% endfor %}
{% for x in l|select('odd') if x > 1 %}{{ loop.length }}{{ x }}{% endfor %}
{% set g = l|map('string') %}{% for x in g %}{{ x }}{{ g|join('-') }}{% endfor %}
{% set g = l|map('string') %}{% for x in g %}{{ x }}{{ g|first }};{% endfor %}
{% set g = l|map('string') %}{% for x in g if x != '3' %}{{ x }}{% endfor %}{{ g|list }}
{% set g = l|map('string') %}{% for x in g %}{% break %}{% endfor %}{{ g|list }}
{% set g = l|map('string') %}{% for x in g %}{{ loop.last }}{% break %}{% endfor %}{{ g|list }}
{% set g = l|map('string') %}{% for x in g %}{{ loop.length }}{% break %}{% endfor %}{{ g|list }}
{% set g = l|map('string') %}{{ '1' in g }}{{ g|list }}{{ g|list }}
{% set g = range(5)|select('odd') %}{% set a, b = g %}{{ a }}{{ b }}
{% set g = range(9)|select('odd') %}{% set a, b = g %}{{ a }}{{ b }}
{% set g = words|unique %}{{ g|first }}{{ g|list }}
{% set g = d|items %}{{ (g|first)|first }}{{ g|list|length }}{{ g|list|length }}
{% set g = l|reverse %}{{ g|first }}{{ g|list }}{{ g|list }}
{% macro f() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}{% set ns = namespace(n=0) %}{% for x in l if f() %}{{ x }}{{ ns.n }}{% endfor %}
{% set ns = namespace(n=0) %}{% macro f(x) %}{% set ns.n = ns.n + x %}{% endmacro %}{% for x in l if not f(x) %}{{ x }}{{ ns.n }};{% endfor %}
{% for n in tree recursive %}{{ n.v }}{{ loop.length }}{{ loop(n.c) }}{% endfor %}
{% for n in tree if n.v recursive %}{{ n.v }}{{ loop.last }}{% if n.c %}({{ loop(n.c|selectattr('v', 'gt', 2)) }}){% endif %}{% endfor %}
{% for k, v in d|items if v %}{{ k }}{{ loop.index }}{% endfor %}
{% for x in l %}{% for y in l if y > x %}{{ loop.index }}{{ y }}{% endfor %};{% endfor %}
{% for x in l %}{% for y in l if loop.index > 1 %}{{ y }}{% endfor %};{% endfor %}
{% for x in 'abc' if x != 'b' %}{{ loop.length }}{{ x }}{% endfor %}
{% for x in missing if x %}{{ x }}{% else %}none{% endfor %}
{% for x in none if x %}{{ x }}{% endfor %}
{% for x in l|map('string') %}{{ loop|length }}{% endfor %}
{% set g = l|select('odd') %}{{ g|length if g is sequence else g|list|length }}
{{ dict(a=1, **{'b': 2}) }}{% for x in d.pop %}x{% endfor %}
{% for x in l %}{% continue %}{% else %}none{% endfor %}
{% for x in l %}{% break %}{% else %}none{% endfor %}
{% for x in l %}{% if loop.last %}{% break %}{% endif %}{% else %}none{% endfor %}
{{ [missing, missing.x]|unique|list }}{{ {missing: 1} }}{{ missing in d }}{{ d.get(missing) }}
{{ {missing: 1}|tojson }}
""".strip().split("\n")

# Unknown filters, tests and tags in places that are reached or not.
UNKNOWN = r"""
{% if no %}{{ s|nosuch }}{% endif %}ok
{% if yes %}{{ s|nosuch }}{% endif %}ok
{% if no %}{{ s is nosuch }}{% endif %}ok
{% if no %}a{% elif no and s|nosuch %}b{% else %}c{% endif %}
{% if no and s|nosuch %}a{% endif %}ok
{% if s|nosuch %}a{% endif %}ok
{% if no %}a{% else %}{{ s|nosuch }}{% endif %}
{% if yes %}a{% else %}{{ s|nosuch }}{% endif %}
{{ s|nosuch if no else 'ok' }}
{{ 'ok' if yes else s|nosuch }}
{{ 'ok' if no and s|nosuch else 'else' }}
{{ 'ok' if s is nosuch else 'else' }}
{{ ('ok' if yes else s|nosuch)|upper }}
{{ s|nosuch if no }}
{{ s|nosuch or 'x' }}
{{ s and s|nosuch }}
{% if no %}{% for x in l %}{{ x|nosuch }}{% endfor %}{% endif %}ok
{% if no %}{% for x in l|nosuch %}{{ x }}{% endfor %}{% endif %}ok
{% if no %}{% for x in l if x is nosuch %}{{ x }}{% endfor %}{% endif %}ok
{% if no %}{% for x in l %}{% else %}{{ s|nosuch }}{% endfor %}{% endif %}ok
{% if no %}{% for x in l %}{% if x %}{{ x|nosuch }}{% endif %}{% endfor %}{% endif %}ok
{% if no %}{% set x = s|nosuch %}{% endif %}ok
{% if no %}{% set x %}{{ s|nosuch }}{% endset %}{% endif %}ok
{% if no %}{% set x|nosuch %}{% endset %}{% endif %}ok
{% if no %}{% filter nosuch %}{% endfilter %}{% endif %}ok
{% if no %}{% filter upper|nosuch %}{% endfilter %}{% endif %}ok
{% if no %}{% filter upper %}{{ s|nosuch }}{% endfilter %}{% endif %}ok
{% if no %}{% with x = s|nosuch %}{% endwith %}{% endif %}ok
{% if no %}{% with x = 1 %}{{ s|nosuch }}{% endwith %}{% endif %}ok
{% if no %}{% macro m() %}{{ s|nosuch }}{% endmacro %}{% endif %}ok
{% if no %}{% macro m(a=s|nosuch) %}{% endmacro %}{% endif %}ok
{% if no %}{% call m() %}{{ s|nosuch }}{% endcall %}{% endif %}ok
{% if no %}{% call m(s|nosuch) %}{% endcall %}{% endif %}ok
{% if no %}{% generation %}{{ s|nosuch }}{% endgeneration %}{% endif %}ok
{% if no %}{% print s|nosuch %}{% endif %}ok
{% if no %}{% if yes %}{{ s|nosuch }}{% endif %}{% endif %}ok
{% if no %}{{ [s|nosuch, (s is nosuch(1)), s.x(s|nosuch(a=1))] }}{% endif %}ok
{% macro m() %}{% if no %}{{ s|nosuch }}{% endif %}ok{% endmacro %}{{ m() }}
{% macro m() %}{{ s|nosuch }}{% endmacro %}ok
{% for x in [] %}{{ x|nosuch }}{% endfor %}ok
{% for x in [] %}{% if x %}{{ x|nosuch }}{% endif %}{% endfor %}ok
{% set x = s|nosuch %}ok
{% set x = s|nosuch if no else 1 %}{{ x }}
{{ s|upper|nosuch }}
{{ s|groupby('a')|upper|nosuch if no }}ok
{% if no %}{{ s|no.such }}{{ s is no.such }}{% endif %}ok
{% if no %}{% include 'x' %}{% endif %}ok
{% if no %}{% include 'x' ignore missing with context %}{% endif %}ok
{% if no %}{% import 'x' as y %}{% endif %}ok
{% if no %}{% from 'x' import y, z as w %}{% endif %}ok
{% if no %}{% extends 'x' %}{% endif %}ok
{% include 'x' %}
{% include 'x' ignore missing %}
{% import 'x' as y %}
{% from 'x' import y %}
{% extends 'x' %}
{% if no %}{% nosuch %}{% endif %}ok
{% if no %}{% autoescape true %}{{ s|nosuch }}{% endautoescape %}{% endif %}ok
{% if no %}{% block b %}{{ s }}{% endblock %}{% endif %}ok
{% if no %}{% block b scoped %}{{ s }}{% endblock b %}{% endif %}ok
{% if no %}{% block b %}{{ s|nosuch }}{% endblock %}{% endif %}ok
{% if no %}{{ l|groupby('a') }}{{ l|pprint }}{{ 1|filesizeformat }}{{ l|random }}{{ s|striptags }}{{ s|urlize }}{{ s|wordwrap }}{{ d|xmlattr }}{% endif %}ok
""".strip().split("\n")

ESCAPES = r"""
'a\’b'
'a\éb'
'a\😀b'
'a\\’b'
'\\\’'
'’é😀'
'\u2019\x41\101\U0001F600\0\7\377'
'\400\777\08'
'\N{BULLET}\N{bullet}\N{Zero Width Space}\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}'
'\N{CJK UNIFIED IDEOGRAPH-4E00}\N{LINE FEED}\N{NBSP}\N{NO-BREAK SPACE}'
'\N{NOSUCH NAME}'
'\N{BULLET'
'\NBULLET'
'\N'
'\x4'
'\xg1'
'\x4é'
'\u12'
'\U00110000'
'\a\b\f\n\r\t\v\\\'\"'
'\q\d\ \-\/\{\}\z\8\9'
"\q'\""
'\'
""".strip().split("\n")

ATTRIBUTES = r"""
d.keys() | list
d['keys']
d['items']
d.get('keys')
d.get('nosuch', 'x')
d.values() | list | length
d.pop is defined
d.pop
d.clear is defined
d.setdefault('a', 1)
d.popitem()
d['pop'] is defined
d.copy().b
d.copy() == d
d.nosuch is defined
d.__class__ is defined
d['__class__'] is defined
d.__len__
dunder.__class__
dunder['__class__']
dunder.__foo__
dunder._x
dunder['_x']
dunder['keys']
dunder['get']
[dunder]|map(attribute='keys')|list
[dunder]|map(attribute='_x')|list
l.append is defined
l.append
l.copy()
l.index(1)
l.count(1)
l.sort()
l.__class__ is defined
l['append'] is defined
l['0'] is defined
l.0
s.__class__ is defined
s['upper']()
s._x is defined
(1, 2).count(1)
(1, 2).index(2)
(1, 2).append is defined
n.nosuch is defined
n.__class__ is defined
none.x is defined
namespace(a=1)._x is defined
namespace(_x=1)._x is defined
namespace(_x=1)
namespace(_x=1)['_x'] is defined
namespace(items=1).items
namespace(a=1)['a']
namespace(a=1).__class__ is defined
n[1:] is defined
d[1:] is defined
0 / -1
nothing[1:] is defined
d.keys()[1:]
l['a':]
l[true:]
range(3)[1:]|list
messages[0].content.upper()
messages[0]['content']['upper']()
messages[0].items()|list
users[0].name.nosuch is defined
yes.nosuch is defined
range(3).count(1)
dict.from_keys([('a', 1)])
dict['x'](a=1)
dict.x is defined
range(3).nosuch is defined
""".strip().split("\n")

STATEMENTS = r"""
{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}{{ ns }}
{% set ns = namespace(__a=1) %}{{ ns.__a is defined }}
{% set ns = namespace(a=1) %}{% set ns.items = 2 %}{{ ns.items }}
{% set ns = namespace({'a': 1, '_b': 2}) %}{{ ns }}
{% set x = h|safe %}{{ x }}{{ x + '<' }}
{% set x %}<{{ h }}{% endset %}{{ x + '<' }}
{% set x|safe %}<{% endset %}{{ x + '<' }}
{% set x|e|upper %}<{% endset %}{{ x + '<' }}
{% filter e %}<{{ h }}{% endfilter %}
{% filter safe|upper %}<{{ h }}{% endfilter %}
{% macro m(a) %}{{ a }}<{% endmacro %}{{ m('<') + '<' }}{{ m('<'|safe) + ('<'|safe) }}
{% macro m() %}{{ caller() + '<' }}{% endmacro %}{% call m() %}{{ h|safe }}{% endcall %}
{% macro m(a) %}{{ a + '<' }}{{ kwargs }}{{ varargs }}{% endmacro %}{{ m('<'|safe, '>'|safe, b='&'|safe) }}
{% for c in h|safe %}{{ c + '<' }}{% endfor %}
{% if h|safe %}x{% endif %}{% if ''|safe %}y{% endif %}
{% for m in messages %}{% set a = m|tojson|safe %}{{ '{"name": "' + m.role + '", "x": ' + a + '}' }}{% endfor %}
{% for m in messages %}{{ '<|' + m.role|e + '|>' + m.content }}{% endfor %}
{% set ns = namespace(t='') %}{% for x in ['<', '>'|safe] %}{% set ns.t = ns.t + x %}{% endfor %}{{ ns.t }}
{% generation %}{{ h|safe + '<' }}{% endgeneration %}
""".strip().split("\n")


class Random(random.Random):
    """Makes expressions and statements out of the parts that the lists above are about."""

    def text(self, depth):
        pick = self.choice
        if depth <= 0 or self.random() < 0.2:
            return pick(["s", "h", "'<x>'", "'&'", "''", "(h|safe)", "(h|e)", "('<%s>'|safe)", "'a %s b'", "('{}'|safe)", "(s|safe)", "u", "ws", "lines"])
        t = lambda: self.text(depth - 1)
        return pick([
            lambda: f"({t()} + {t()})",
            lambda: f"({t()} ~ {t()})",
            lambda: f"({t()} * {self.randrange(3)})",
            lambda: f"({t()} % {self.any(depth - 1)})",
            lambda: f"{t()}[{self.randrange(-3, 4)}]",
            lambda: f"{t()}[{self.randrange(-3, 4)}:{self.randrange(-3, 9)}]",
            lambda: f"({t()}|{pick(['upper', 'lower', 'title', 'capitalize', 'trim', 'e', 'safe', 'string', 'tojson', 'reverse', 'first', 'last', 'indent', 'default(1)'])})",
            lambda: f"({t()}|replace({t()}, {t()}))",
            lambda: f"({t()}|format({self.any(depth - 1)}))",
            lambda: f"{t()}.{pick(['upper', 'lower', 'title', 'capitalize', 'strip', 'lstrip', 'rstrip'])}()",
            lambda: f"{t()}.{pick(['strip', 'rstrip', 'lstrip', 'removeprefix', 'removesuffix'])}({t()})",
            lambda: f"{t()}.replace({t()}, {t()})",
            lambda: f"{t()}.{pick(['split', 'rsplit'])}({pick([t(), 'none'])}, {self.randrange(-1, 3)})[{self.randrange(-1, 1)}]",
            lambda: f"{t()}.splitlines()[0]",
            lambda: f"{t()}.join({self.list(depth - 1)})",
            lambda: f"{t()}.format({self.any(depth - 1)})",
            lambda: f"({self.items(depth - 1)}|join({t()}))",
            lambda: f"({t()} {pick(['or', 'and'])} {t()})",
            lambda: f"({t()} if {self.test(depth - 1)} else {t()})",
        ])()

    def list(self, depth):
        return self.choice([
            lambda: f"[{', '.join(self.any(depth - 1) for _ in range(self.randrange(4)))}]",
            lambda: f"({self.items(depth - 1)}|list)",
            lambda: f"{self.text(depth - 1)}.split()",
            lambda: "words", lambda: "l", lambda: "mixed", lambda: "users", lambda: "rows",
        ])()

    def items(self, depth):
        """A list or a generator."""
        if depth <= 0:
            return self.choice(["words", "l", "mixed", "users", "rows", "messages", "range(4)", "d", "missing", "[]", "s"])
        x = self.items(depth - 1)
        return self.choice([
            lambda: self.list(depth - 1),
            lambda: f"({x}|map({self.choice(['string', 'upper', 'e', 'safe', 'length', 'abs', 'int', 'first', 'list', 'tojson', 'nosuch', 'default', 'trim', 'title'])!r}))",
            lambda: f"({x}|map(attribute={self.choice(['k', 'v', 'name', 'role', 'age', 0, 'tags.0'])!r}{self.choice(['', ', default=1'])}))",
            lambda: f"({x}|{self.choice(['select', 'reject'])}({self.choice(['', repr('odd'), repr('defined'), repr('string'), repr('escaped'), repr('none'), repr('nosuch'), repr('gt') + ', 1', repr('in') + ', l'])}))",
            lambda: f"({x}|{self.choice(['selectattr', 'rejectattr'])}({self.choice(['k', 'v', 'name', 'age', 'role'])!r}{self.choice(['', ', ' + repr('defined'), ', ' + repr('gt') + ', 26', ', ' + repr('eq') + ', ' + repr('bob')])}))",
            lambda: f"({x}|unique)",
            lambda: f"({x}|reverse)",
            lambda: "(d|items)",
        ])()

    def any(self, depth):
        return self.choice([
            lambda: self.text(depth), lambda: self.text(depth), lambda: self.list(depth), lambda: "1", lambda: "none", lambda: "2.5", lambda: "missing",
            lambda: "{'a': h|safe, 'b'|safe: 1}", lambda: "('<', h|e)", lambda: f"({self.items(depth)}|first)", lambda: f"({self.items(depth)}|{self.choice(['length', 'max', 'min', 'last', 'sort', 'list', 'tojson'])})",
        ])()

    def test(self, depth):
        return self.choice([
            lambda: f"{self.text(depth)} in {self.text(depth)}", lambda: f"{self.text(depth)} == {self.text(depth)}",
            lambda: f"{self.text(depth)} < {self.text(depth)}", lambda: f"{self.any(depth)} in {self.items(depth)}",
            lambda: f"{self.any(depth)} is {self.choice(['escaped', 'string', 'defined', 'iterable', 'sequence', 'mapping', 'number', 'none'])}",
            lambda: f"{self.text(depth)}.startswith({self.text(depth)})", lambda: self.items(depth), lambda: self.text(depth),
        ])()

    def statement(self):
        part = lambda: self.choice(["{{ x }}", "{{ loop.index }}", "{{ loop.last }}", "{{ loop.length }}", "{{ loop.revindex }}", "{{ loop.previtem }}", "{{ loop.nextitem }}", "{{ loop.first }}", "{{ g|first }}",
            "{% set ns.n = ns.n + 1 %}", "{{ ns.n }}", "{% if ns.n > 1 %}{% break %}{% endif %}", "{% if x is string %}{% continue %}{% endif %}", ";", "{{ x|string|length }}", "{{ ns.t + x|string }}", "{% set ns.t = ns.t + x|e %}"])
        condition = self.choice(["", "", " if ns.n < 2", " if x", " if x is string", " if x is not none and x > 1", " if x != g|first", f" if {self.test(1)}"])
        source = self.choice(["g", "g", self.items(2), self.items(3)])
        return (
            "{% set ns = namespace(n=0, t='<') %}{% set g = " + self.items(2) + " %}{% for x in " + source + condition + " %}" + "".join(part() for _ in range(self.randrange(1, 6)))
            + self.choice(["", "{% else %}none"]) + "{% endfor %}" + self.choice(["", "{{ g|list }}", "{{ ns.n }}", "{{ g|first }}"])
        )


def render(template):
    case = {"template": template}
    try:
        text = _compile_jinja_template(template).render(**copy.deepcopy(VARS))  # indent changes lists
        text.encode()
        # What depends on addresses is refused.
        case.update({"refused": True} if re.search(r" at 0x|dict_|range\(|<jinja2|built-in", text) else {"output": text})
    except Exception as e:  # any exception means that the template fails
        case["error"] = type(e).__name__
    return case


def main(count=700, seed=44, file="semantics.json"):
    lists = MARKUP + LAZY + ESCAPES + ATTRIBUTES
    templates = ["{{ %s }}" % e for e in lists] + LOOPS + UNKNOWN + STATEMENTS
    rng = Random(int(seed))
    for i in range(int(count)):
        templates.append(rng.statement() if i % 3 == 0 else "{{ %s }}" % rng.choice([rng.text, rng.text, rng.any])(3))
    cases = [render(t) for t in templates]
    if len(cases) > 2000:
        cases = [c for c in cases if len(c["template"]) < 400]
    with open(file, "w", encoding="utf-8") as out:
        json.dump({"vars": VARS, "cases": cases}, out, ensure_ascii=True, indent=0)
    print(len(cases), "cases", sum("error" in c for c in cases), "errors", sum("refused" in c for c in cases), "refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
