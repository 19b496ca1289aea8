"""Renders every chat template found below some folders as Transformers does, with conversations of every kind.

    templates.py FOLDER...

Templates are the chat_template of every tokenizer_config.json, every *.jinja file about messages, and every text in a Python
file that is one. Prints a JSON line for each distinct template:
{"name": ..., "template": ..., "renders": [{"vars": {...}, "text": ... or null if it raises}]}.
"""

import ast
import json
import os
import sys
import warnings

from transformers.utils.chat_template_utils import _compile_jinja_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather in a city, "now" or <later> & more.',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, e.g. Zürich"},
                    "days": {"type": ["integer", "null"], "default": 1, "minimum": 0.5},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "where": {"type": "object", "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "items": {"type": "string"}}}},
                    "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "Stop.", "parameters": {"type": "object", "properties": {}}}},
]


def call(name, arguments, id="call0001a"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    def m(role, content, **more):
        return {"role": role, "content": content, **more}

    plain = [m("system", "Be brief.\n"), m("user", " Hello there! "), m("assistant", "Hi, how can I help?"), m("user", "What is 2 < 3 & 4?")]
    yield "plain", {"messages": plain}
    yield "tools", {"messages": [m("system", "Use tools."), m("user", "Weather?")], "tools": TOOLS}
    yield "tool calls", {
        "messages": [
            m("user", "Weather in Zürich?"),
            m("assistant", "", tool_calls=[call("get_weather", {"city": "Zürich", "days": 2, "f": 1.5, "n": None, "l": [True, "</x>"], "d": {"k": -0.0}})]),
            m("tool", '{"temp": 21.5}', name="get_weather", tool_call_id="call0001a"),
            m("assistant", "21.5 degrees."),
            m("user", "Stop."),
            m("assistant", "Stopping.", tool_calls=[call("stop", {}, "call0002b")]),
            m("tool", "stopped", name="stop", tool_call_id="call0002b"),
        ],
        "tools": TOOLS,
    }
    yield "parts", {
        "messages": [
            m("system", [{"type": "text", "text": "Be brief."}]),
            m("user", [{"type": "text", "text": "One. "}, {"type": "image"}, {"type": "text", "text": "Two."}]),
            m("assistant", [{"type": "text", "text": "Three."}]),
            m("user", [{"type": "text", "text": "Four"}]),
        ]
    }
    yield "reasoning", {
        "messages": [
            m("user", "Think."),
            m("assistant", "<think>\nFirst thought.\n</think>\n\nDone.", reasoning_content="First thought.", thinking="First thought."),
            m("user", "Again."),
            m("assistant", "Done again.", reasoning_content="Second\n\nthought.\n", reasoning="Second"),
            m("user", "And?"),
        ],
        "enable_thinking": True,
        "reasoning_effort": "high",
    }
    yield "unicode", {
        "messages": [m("system", "Ünïcödé \u2028 漢字"), m("user", "👩‍👩‍👧 \u200b\u00a0 ﬁ Å İ ß \u0301 \x0b\x1c end "), m("assistant", "Ω\r\nb\tc\x85d"), m("user", "\"'\\ {{ x }} {% y %}")],
        "enable_thinking": False,
    }
    yield "None content", {
        "messages": [
            m("developer", "Rules."),
            m("user", "Go."),
            m("assistant", None, tool_calls=[call("stop", "{}")]),
            m("tool", "ok", tool_call_id="call0001a"),
            m("assistant", None),
            m("user", "x", name="Ann"),
        ],
        "tools": TOOLS[1:],
    }


def is_template(text):
    return "messages" in text and "{%" in text and "%}" in text and "for " in text


def found(folders):
    """Every template with a name, the same one once."""
    seen = set()
    for folder in folders:
        for base, _, names in sorted(os.walk(folder)):
            for name in sorted(names):
                path = os.path.join(base, name)
                texts = []
                if name == "tokenizer_config.json":
                    with open(path, encoding="utf-8") as f:
                        template = json.load(f).get("chat_template") or []
                    texts = [template] if isinstance(template, str) else [t["template"] for t in template]
                elif name.endswith(".jinja"):
                    with open(path, encoding="utf-8") as f:
                        texts = [f.read()]
                elif name.endswith(".py"):
                    with open(path, encoding="utf-8", errors="replace") as f:
                        source = f.read()
                    if "{%" not in source or "messages" not in source:
                        continue
                    try:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            tree = ast.parse(source)
                    except SyntaxError:
                        continue
                    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
                for text in texts:
                    if not is_template(text) or text in seen:
                        continue
                    try:
                        _compile_jinja_template(text)
                    except Exception:
                        continue  # text about templates
                    seen.add(text)
                    yield f"{os.path.relpath(path, folder)}#{len(seen)}", text


def main():
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    for name, template in found(sys.argv[1:]):
        compiled = _compile_jinja_template(template)
        renders = []
        for kind, chat in conversations():
            for generate in (True, False):
                variables = {**special, "tools": None, "documents": None, **chat, "add_generation_prompt": generate}
                given = json.dumps(variables)
                try:
                    text = compiled.render(**variables)
                    text.encode()
                except Exception:
                    text = None
                renders.append({"kind": kind, "vars": json.loads(given), "text": text})
        print(json.dumps({"name": name, "template": template, "renders": renders}), flush=True)


main()
