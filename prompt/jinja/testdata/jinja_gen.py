"""Writes jinja.json: the outputs of Jinja2, configured as in Transformers, for many small templates.

Run in this folder with the Python of an engine (test/tools/install.sh engines): python jinja_gen.py
"""

import json

from transformers.utils.chat_template_utils import _compile_jinja_template

VARS = {
    "s": "Hello World",
    "u": "Straße ΑΣΣΟΣ naïve İı ǆ ﬁ 漢字 😀",
    "ws": "  two words\t\n",
    "lines": "one\ntwo\r\nthree\u2028four\n\nsix",
    "n": 7,
    "neg": -7,
    "f": 2.5,
    "big": 123456789012345678901234567890,
    "yes": True,
    "no": False,
    "nothing": None,
    "empty": [],
    "l": [3, 1, 2],
    "mixed": [1, "a", None, True, 2.0, [1, "x"], {"k": "v"}],
    "words": ["b", "A", "c", "a"],
    "d": {"b": 1, "a": {"x": [1, 2]}, "items": "shadowed", "c": None},
    "users": [
        {"name": "bob", "age": 30, "tags": ["x"]},
        {"name": "Alice", "age": 25, "tags": []},
        {"name": "carl", "age": 30},
    ],
    "tree": [{"v": 1, "c": [{"v": 2, "c": []}, {"v": 3, "c": [{"v": 4, "c": []}]}]}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! <b>&'\"</b>"},
    ],
}

EXPRESSIONS = r"""
s
u
nothing
yes
n + 1
n - 10
n * 3
n / 2
neg // 2
neg % 3
n ** 3
2 ** -1
2 ** 100
big
big + 1
-big
f // 1
-f % 2
7.0
1e16
1e15
1e-5
0.1 + 0.2
100000000000000000000000.0
1_000
0x1F
0b101
0o17
n > 3 and s
n < 3 or s
not n
not not s
n == 7.0
1 == True
"a" == 1
n != 7
1 < 2 < 3
1 < 3 < 2
"b" in "abc"
"z" not in "abc"
2 in l
"a" in d
4 in [1, 2]
[1, 2] == [1, 2]
(1, 2) == [1, 2]
[1, 2] < [1, 3]
{"a": 1} == {"a": 1.0}
"a" < "b"
"a" if yes else "b"
"a" if no
"a" if no else "b" if no else "c"
s ~ n ~ nothing ~ yes
"x" * 3
3 * "x"
[1] * 2
[1] + [2]
(1,) + (2,)
[1, "a", None, 2.5, True]
("a",)
()
{"a": 1, "b": [1, {"c": "d'e"}], 'q': 'x"y\'z'}
'it\'s "q"'
"\u00e9\x41\n\t\\ \101 \d"
"a" "b"
s[0]
s[-1]
s[99]
s[1:4]
s[::-1]
s[:-3]
s[::2]
u[3:8]
l[1:]
l[::-1]
l[-1]
l[5]
d.a.x[1]
d["b"]
d.b
d["items"]
d.missing
d["missing"]
d.a["x"][0]
d.missing is defined
d.get("b")
d.get("zz", 5)
d.get("zz")
d.keys()|list
d.values()|list
d.items()|list
missing
missing is undefined
missing|default("x")
missing or "y"
""|default("z", true)
nothing|default("z")
nothing|default("z", true)
missing == missing2
s.upper()
s.lower()
u.upper()
u.lower()
u.title()
u.capitalize()
"they're bill's friends".title()
"they're (bill's) friends-x"|title
ws.strip()
ws.lstrip()
ws.rstrip()
"xxaxx".strip("x")
"abc".strip("")
s.split()
s.split("o")
s.split("o", 1)
"a,b,,c".split(",")
"  a  b ".split(None, 1)
"a b c".rsplit(" ", 1)
"a  b  c ".rsplit(None, 1)
lines.splitlines()
lines.splitlines(true)
s.replace("o", "0")
s.replace("o", "0", 1)
s.startswith("Hell")
s.startswith(("x", "He"))
s.endswith("ld")
s.find("o")
s.find("zz")
s.rfind("o")
u.find("ΑΣ")
s.find("o", 5)
s.index("W")
s.count("l")
"".join(["a", "b"])
", ".join(words)
"abc".isdigit()
"12".isdigit()
"²".isdigit()
"abc".isalpha()
" \n".isspace()
"Abc".removeprefix("A")
"Abc".removesuffix("c")
"{} and {}".format(1, "a")
"{0}-{1}-{0}".format("a", "b")
"%s"|format("x")
"%s-%s"|format(1, 2)
l|sort
l|sort(reverse=true)
words|sort
words|sort(case_sensitive=true)
users|sort(attribute="name")|map(attribute="name")|list
users|sort(attribute="age,name")|map(attribute="name")|list
users|sort(attribute="age", reverse=true)|map(attribute="name")|list
users|selectattr("age", "equalto", 30)|map(attribute="name")|join(",")
users|selectattr("age", ">", 26)|list|length
users|rejectattr("tags")|map(attribute="name")|list
users|selectattr("tags", "defined")|list|length
l|select("odd")|list
l|reject("greaterthan", 1)|list
[0, 1, "", "a"]|select|list
l|map("string")|list
words|map("upper")|join
users|map(attribute="tags", default="none")|list
l|first
l|last
empty|first
empty|first is defined
l|length
s|length
d|length
u|length
l|join("-")
users|join(", ", attribute="name")
l|reverse|list
s|reverse
l|min
l|max
words|min
words|max
words|unique|list
["a", "A", "b"]|unique|list
l|list
s|list
d|list
d.a|items|list
{"b": 2, "a": 1}|dictsort
{"b": 1, "a": 2}|dictsort(by="value")
{"B": 1, "a": 2}|dictsort(case_sensitive=true)
f|round
2.5|round
3.5|round
2.675|round(2)
2.1|round(0, "ceil")
2.9|round(0, "floor")
7|round
neg|abs
"42"|int
" 42 "|int
"4_2"|int
"x"|int
"x"|int(5)
"42.9"|int
f|int
yes|int
"1e3"|float
"x"|float
n|float
n|string
nothing|string
mixed|string
s|upper|lower|title|capitalize
u|title
"  x "|trim
"xxaxx"|trim("x")
"a&<b>'\""|e
"a"|safe
s|replace("l", "L", 2)
"a\nb\n\nc"|indent
"a\nb\n\nc"|indent(2, true)
"a\nb\n\nc"|indent(2, true, true)
"a\nb"|indent("> ")
""|indent(first=true)
d|tojson
mixed|tojson
u|tojson
u|tojson(ensure_ascii=true)
d|tojson(indent=2)
d|tojson(indent=0)
l|tojson(separators=(",", ":"))
d.a|tojson(separators=(",", ":"), indent=1)
{"b": 1, "a": 2}|tojson(sort_keys=true)
{1: "a", none: 2, true: 3, 2.5: 4}|tojson
[1.0, 1e100, 0.1, big, -0.0]|tojson
"\x7f\u2028</script>\b\f"|tojson
"\x7f"|tojson(ensure_ascii=true)
[]|tojson(indent=2)
1e400
n is odd
n is even
n is number
yes is number
yes is boolean
n is boolean
yes is integer
n is integer
f is float
s is string
l is iterable
n is iterable
d is mapping
l is mapping
l is sequence
s is sequence
d.keys() is sequence
nothing is none
none is none
s is defined
yes is true
n is true
no is false
n is eq 7
n is gt 3
n is in l
2 is in l
n is not in l
n is not none
range(3)|list
range(1, 4)|list
range(5, 0, -2)|list
range(3)[1]
dict(a=1, b=2)
dict([("x", 1)])
dict(d.a, z=1)
namespace(a=1).a
[[1, 2], [3, 4]]|map("first")|list
[[1, 2], [3]]|map("length")|list
l|map("abs")|list
users[0]["name"]|upper
users|map(attribute="tags.0")|list
(users|first).name
messages[0].role == "system" and messages[0]["content"]
messages|length - 1
messages[1:]|map(attribute="role")|list
messages[-1].content|e
s|length > 3 and s|length < 100
-n|abs
(-n)|abs
- n ** 2
2 ** 3 ** 2
1 + 2 * 3 - 4 / 2
1 ~ 2 + 3
not n == 7
s is defined and s
n is defined or missing.foo
"a" in s|lower
[1, [2, [3]]] == [1, [2, [3]]]
loop is defined
d.update is defined
l.append is defined
l.index(1)
l.count(1)
l.copy() == l
d|list|sort
"%s" % nothing
none ~ ""
[none]|string
""|int
"abc"[1:][0]
"a\\nb"
'a\'b'
1 if 0 else 2
(1, 2)[1]
{"a": {"b": 1}}.a.b
s.zzz is defined
"ab" "cd"|upper
9007199254740993 == 9007199254740992.0
9223372036854775807 + 1
5 // 0.3
-5 // 0.3
5 % -0.3
[l|sort, l]
-0.0
1.5e3
"ﬃ"|upper
"ǆ"|title
"ΌΣΟΣ ΑΣ. Σ"|lower
"\u0130"|lower
"tschüß"|upper
"İ".lower()|length
"""

TEMPLATES = [
    "a\n{% if yes %}\nb\n{% endif %}\nc\n",
    "  {% if yes %}x{% endif %}  \n  {%+ if yes %}y{% endif %}\n",
    "a {%- if yes -%} \n b \n {%- endif -%} c",
    "a  {{- s -}}  b\n {{ n }}\n",
    "{# comment #}\nx {#- strip -#} y\n  {# c #}\nz",
    "{% raw %}{{ x }}{% endraw %}|{%- raw -%}  {% a %} {%- endraw -%}  z",
    "{% raw %}\n  {{ y }}\n  {% endraw %}\nq",
    "x\n{% if yes +%}\ny\n{% endif +%}\nz",
    "\n\nx\n\n",
    "a\r\nb\rc{% if yes %}\r\nd{% endif %}",
    "{% for x in l %}{{ loop.index }}/{{ loop.length }}:{{ x }}{% if not loop.last %},{% endif %}{% endfor %}",
    "{% for x in l %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}",
    "{% for x in empty %}a{% else %}none{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index }}{{ x }}{% else %}none{% endfor %}",
    "{% for x in l if x > 10 %}{{ x }}{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in d|dictsort %}{{ k }}{% endfor %}",
    "{% for (a, (b, c)) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for c in 'héé' %}[{{ c }}]{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{{ loop.index }}{% endfor %}",
    "{% for n in tree recursive %}{{ n.v }}@{{ loop.depth }}{% if n.c %}({{ loop(n.c) }}){% endif %}{% endfor %}",
    "{% for x in [1, 2] %}{% for y in [1, 2] %}{{ loop.index }}{{ x }}{{ y }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=1, found=false) %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.found }}{{ ns.none is defined }}",
    "{% if yes %}{% set x = 1 %}{% endif %}{{ x }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set a, b = b, a %}{{ a }}{{ b }}",
    "{% set x = 1, 2 %}{{ x }}",
    "{% set x %}a {{ n }}{% set y = 1 %}{% endset %}[{{ x }}]{{ y }}",
    "{% set x | upper | trim %} a {% endset %}[{{ x }}]",
    "{% filter upper %}abc {{ s }}{% endfilter %}",
    "{% filter replace('a', 'b')|upper %}aa{% endfilter %}",
    "{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(b=1, a=0) }} {{ m() }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}",
    "{% macro m(a) %}{{ caller(a) }}{% endmacro %}{% call(x) m(5) %}<{{ x }}>{% endcall %}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in {{ n }}{% endcall %}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% macro m() %}{{ late }}{% endmacro %}{% set late = 1 %}{{ m() }}",
    "{% for i in [1, 2] %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(4) }}",
    "{% macro m(x) %}{% set y = x %}{{ y }}{% endmacro %}{{ m(1) }}{{ y }}",
    "{% macro m(x) %}a{% endmacro %}{{ m(1) ~ m(2)|upper }}{{ m }}",
    "{{ m is defined }}{% macro m() %}{% endmacro %}{{ m is defined }}",
    "{% generation %}a{% set z = 1 %}{{ z }}{% endgeneration %}{{ z }}",
    "{% print n, s %}",
    "{% if no %}a{% elif n == 7 %}b{% else %}c{% endif %}",
    "{% if no %}a{% elif no %}b{% else %}c{% endif %}",
    "{% if 1, %}tuple{% endif %}",
    "{% if yes: %}colon{% endif %}",
    "{{ raise_exception('no ' ~ n) }}",
    "{% if no %}{{ raise_exception('x') }}{% endif %}ok",
    "{% set g = users|selectattr('age', 'eq', 30) %}{{ g|list|length }}{{ g|list|length }}{{ 'true' if g }}",
    "{% set g = users|map(attribute='name') %}{{ g|first }}{{ g|join(',') }}",
    "{% set ks = d.keys() %}{{ ks|list|length }}{{ ks|length }}{{ 'b' in ks }}",
    "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>\n' + m.content | trim + '<|end|>\n' }}{% endfor %}",
    "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n        {{- 'U: ' + m.content }}\n    {%- else %}\n        {{- m.role }}\n    {%- endif %}\n{%- endfor %}\n",
    "{{ messages | tojson(indent=4) }}",
    "{{- '\\n' -}}x",
    "{{ namespace() }}{{ namespace(a=[1]) }}",
    "{{ loop }}",
    "{% for x in l %}{{ loop }}{% endfor %}",
    "{% for x in l|map('string') %}{{ loop.last }}{% endfor %}",
    "{{ [1, 2, 3,] }}{{ {'a': 1,} }}{{ (1, 2,) }}",
    "{{ l[1:2] + l[:1] }}{{ l[n:] }}{{ s[n:][:2] }}",
    "{{ '{{' }}{{ '%}' }}{{ \"}}\" }}",
    "{ { not a tag } } {x} % } #}",
    "{{ {'a': {'b': [1]}}['a']['b'][0] }}",
    # templates that Jinja2 rejects
    "{{ missing.x }}", "{{ missing() }}", "{{ missing + 1 }}", "{{ missing < 1 }}", "{{ -missing }}", "{{ missing|int }}",
    "{{ missing[0] }}", "{{ missing.x is defined }}", "{{ nothing.x.y }}", "{{ 'a' + 1 }}", "{{ 'a' + nothing }}",
    "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}", "{{ 1.0 / 0 }}", "{{ n() }}", "{{ n.x() }}", "{{ 1 in 2 }}",
    "{{ 1 in 'a' }}", "{{ [1] < ['a'] }}", "{{ l|sort(attribute='x') }}", "{{ mixed|sort }}", "{{ n|length }}", "{{ n|list }}",
    "{% for x in n %}{% endfor %}", "{% for x in nothing %}{% endfor %}", "{% for a, b in l %}{% endfor %}",
    "{% set a, b = 1 %}", "{% set d.x = 1 %}", "{{ d.update({'a': 1}) }}", "{{ l.append(1) }}", "{{ d.pop('a') }}",
    "{{ namespace(_x=1) }}", "{{ missing|tojson }}", "{{ range|tojson }}", "{{ l|map('string')|tojson }}", "{{ d.keys()|tojson }}",
    "{{ users|selectattr('age')|length }}", "{{ l|map('nosuch')|list }}", "{{ l|select('nosuch')|list }}", "{{ s.nosuch() }}",
    "{{ d.nosuch() }}", "{{ s|replace('a') }}", "{{ s.split('') }}", "{{ s.join(1) }}", "{{ s.join([1]) }}", "{{ s.index('q') }}",
    "{{ l.index(99) }}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=1) }}",
    "{% macro m() %}{% endmacro %}{% call m() %}{% endcall %}", "{{ range(1000000) }}", "{{ range(1, 2, 0) }}", "{{ '%d' % 'a' }}",
    "{{ '%s %s' % 'a' }}", "{{ '%s' % (1, 2) }}", "{{ '{}'.format() }}", "{{ '{x}'.format(1) }}", "{{ {[1]: 2} }}",
    "{{ d[[1]] is defined }}", "{{ 's'[0:1:0] }}", "{{ dict(1) }}", "{{ 2 ** 'a' }}", "{{ [] + () }}", "{{ [1] + 'a' }}",
    # templates that do not compile
    "{% if %}{% endif %}", "{% if yes %}", "{% endif %}", "{{ }}", "{{ 1 + }}", "{{ 'abc }}", "{{ (1 }}", "{{ 1) }}", "{{ [1 }}",
    "{% nosuch %}", "{{ s|nosuch }}", "{{ s is nosuch }}", "{# open", "{% raw %}", "{{ a b }}", "{% for x %}{% endfor %}",
    "{% for in l %}{% endfor %}", "{% set %}", "{% set 1 = 2 %}", "{% set true = 2 %}", "{% break %}", "{% do 1 %}", "{{ $ }}",
    "{{ a ! b }}", "{{ 1 is is }}", "{{ x is defined is defined }}", "{% macro m(a=1, b) %}{% endmacro %}", "{% call 1 %}{% endcall %}",
    "{{ f(a=1, 2) }}", "{{ f(*a, *b) }}", "{% if a %}{% else %}{% elif b %}{% endif %}", "{{ '\\x1' }}", "{{ s.1.x. }}", "{{ 01 }}",
    "{{ s|upper.x }}", "{{ (s|list)[0] }}", "{{ s|list[0] }}", "{% if a if b else c %}{% endif %}", "{{ .5 }}", "{% filter %}{% endfilter %}",
    "{% with a %}{% endwith %}", "{% for x in l %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}", "{{", "{%", "{#", "{{ '", "{{ \"\\",
    "{% raw", "{% raw %}{%", "{% raw %}{% endraw", "{{ x[ }}", "{{ x[1:2:3:4] }}", "{{ {1} }}", "{{ {1:} }}", "{%- -%}", "{%}", "{{-}}", "}}",
]


def main():
    cases = []
    expressions = [e for e in EXPRESSIONS.split("\n") if e]
    for template in ["{{ %s }}" % e for e in expressions] + TEMPLATES:
        case = {"template": template}
        try:
            case["output"] = _compile_jinja_template(template).render(**VARS)
        except Exception as e:  # any exception means that the template fails
            case["error"] = type(e).__name__
        cases.append(case)
    with open("jinja.json", "w", encoding="utf-8") as out:
        json.dump({"vars": VARS, "cases": cases}, out, ensure_ascii=True, indent=0)
    print(len(cases), "cases")


if __name__ == "__main__":
    main()
