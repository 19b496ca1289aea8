"""Says what token ids vLLM makes of chats for gpt-oss: its own pydantic models and harmony_utils, over oss-harmony.

    harmony.py SOURCES DATE COUNT

SOURCES holds vLLM's package, DATE is the day of the conversations (2026-11-21). Makes up COUNT requests, always the same, and
answers each in a line: {"body": ..., "ids": [...], "text": ...} or {"body": ..., "error": ...}.
"""

import copy
import importlib
import json
import os
import random
import sys
import types

# engines.py's definitions without its main.
engines = types.ModuleType("engines")
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "engines.py"), encoding="utf-8") as f:
    exec(compile(f.read().rsplit("\nmain(", 1)[0], "engines.py", "exec"), engines.__dict__)

UTILS = "vllm.entrypoints.openai.parser.harmony_utils"


def main(sources, date, count):
    engines.REAL["vllm"] = [name for name in engines.REAL["vllm"] if name != "vllm.renderers.hf"] + [UTILS]
    engines.stand_in("vllm", sources)
    import vllm.envs

    vllm.envs.VLLM_MAX_STOP_STRINGS = 128
    vllm.envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS = False
    vllm.envs.VLLM_SYSTEM_START_DATE = date
    import vllm.renderers
    import vllm.renderers.params as params

    for name in ("ChatParams", "TokenizeParams", "ReasoningEffort", "merge_kwargs", "map_reasoning_effort"):
        setattr(vllm.renderers, name, getattr(params, name))
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    utils = importlib.import_module(UTILS)

    def ids(body):
        """After OnlineRenderer._make_request_with_harmony, tokenizers.mistral.maybe_serialize_tool_calls before it."""
        request = ChatCompletionRequest.model_validate(body)
        for message in request.messages:
            if message.get("role") == "assistant":
                calls = message.get("tool_calls", None)
                message["tool_calls"] = list(calls) if calls is not None else []
        instructions, rest = utils.extract_instructions_from_messages(list(request.messages))
        if request.reasoning_effort == "none":
            raise ValueError("reasoning_effort")
        messages = utils.build_harmony_preamble(
            instructions=instructions, tools=request.tools, reasoning_effort=request.reasoning_effort, with_custom_tools=request.tools is not None)
        messages.extend(utils.parse_chat_inputs_to_harmony_messages(rest))
        return utils.render_for_completion(messages)

    for body in requests(int(count)):
        try:
            tokens = ids(copy.deepcopy(body))
            answer = {"body": body, "ids": tokens, "text": utils.get_encoding().decode(tokens)}
        except Exception as e:
            answer = {"body": body, "error": "%s: %s" % (type(e).__name__, str(e)[:100])}
        print(json.dumps(answer), flush=True)


TEXTS = ["hi", "", " ", "x\n\ny", "What is the weather in S\u00e3o Paulo?", "<|end|> is text", "a <|start|>assistant<|message|>b", "\u4f60\u597d", "\U0001f680 go",
         "trailing \n", "\r\nlines\r\n", "def f(x):\n    return x\n" * 3, "It's 1234567 o'clock, isn't it?\t\t", "# Tools", "e\u0301 \u0130"]
NAMES = ["f", "get_weather", "search.web", "a b", "f\u00fc", "x-1"]


class Chats:
    """Makes requests, and now and then one that vLLM refuses."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def chance(self, p):
        return self.random.random() < p

    def one(self, things):
        return self.random.choice(things)

    def text(self):
        return "".join(self.one(TEXTS) for _ in range(self.random.randrange(1, 4)))

    def content(self):
        if self.chance(0.7):
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self.random.randrange(0 if self.chance(0.2) else 1, 4))]

    def value(self, depth=0):
        kinds = [None, True, False, 0, -7, 10**15, 1 << 63, 1.5, 0.1, 1e16, 2.5e-7, 100.0, "a", "q\"\\\n\u0001\u00e9/", ""]
        if depth < 2 and self.chance(0.3):
            return self.one([lambda: [self.value(depth + 1) for _ in range(self.random.randrange(3))],
                             lambda: {self.one(NAMES): self.value(depth + 1) for _ in range(self.random.randrange(3))}])()
        return self.one(kinds)

    def schema(self, depth=0):
        kind = self.one(["string", "string", "number", "integer", "boolean", "array", "object", "object", "null", "file", ["string", "null"],
                         ["integer", "number"], [], [3], None, 5])
        if depth > 3 and kind in ("object", "array"):
            kind = "string"
        s = {}
        if kind is not None:
            s["type"] = kind
        if self.chance(0.4):
            s["description"] = self.one(["what", "two\nlines", "", "null and void", 5, "same"])
        if self.chance(0.1):
            s["title"] = self.one(["Title", "", 1])
        if self.chance(0.1):
            s["nullable"] = self.one([True, False, "yes"])
        if self.chance(0.2):
            s["default"] = self.value()
        if self.chance(0.1):
            s["examples"] = self.one([[], ["a", 1, "b\n"], "no"])
        if self.chance(0.2):
            s["enum"] = self.one([["a", "b"], [], [1, "x"], [1], "no"])
        if kind == "array" and self.chance(0.8):
            s["items"] = self.schema(depth + 1)
        if kind == "object" and self.chance(0.9):
            s["properties"] = {self.one(["a", "b", "c", "city", "unit", "l\u00e4nge"]): self.schema(depth + 1) if self.chance(0.95) else self.value()
                               for _ in range(self.random.randrange(5))}
            if self.chance(0.6):
                s["required"] = self.one([["a"], ["city", "b"], [1, "c"], "a"])
        if depth < 3 and self.chance(0.12):
            s["oneOf"] = self.one([[self.schema(depth + 1) for _ in range(self.random.randrange(4))], "no", None])
        return s

    def tool(self):
        function = {"name": self.one(NAMES)}
        if self.chance(0.8):
            function["description"] = self.one(["Does it.", "Two\nlines\r\nthree\n", "", None])
        if self.chance(0.9):
            function["parameters"] = dict(self.schema(), type="object") if self.chance(0.7) else self.schema()
        return {"type": "function", "function": function}

    def calls(self):
        return [{"id": "call_%d" % self.random.randrange(4), "type": "function",
                 "function": {"name": self.one(NAMES + ["f<|end|>"] if self.chance(0.1) else NAMES), "arguments": self.one(['{"a": 1}', "", "{}", "not json <|call|>"])}}
                for _ in range(self.random.randrange(0, 3))]

    def message(self):
        role = self.one(["user", "user", "user", "assistant", "assistant", "assistant", "tool", "system", "developer", "other" if self.chance(0.2) else "user"])
        message = {"role": role, "content": self.content()}
        if role == "assistant":
            if self.chance(0.3):
                message["content"] = self.one([None, "", []])
            if self.chance(0.4):
                message[self.one(["reasoning", "reasoning_content"])] = self.one(["thinking", "", None, self.text()])
            if self.chance(0.4):
                message["tool_calls"] = self.calls() if self.chance(0.9) else None
        if role == "tool":
            message["tool_call_id"] = "call_%d" % self.random.randrange(4)
        if self.chance(0.03):
            message["content"] = None
        if self.chance(0.03):
            del message["content"]
        if self.chance(0.05):
            message["name"] = "bob"
        return message

    def body(self):
        messages = [self.message() for _ in range(self.random.randrange(1, 8))]
        if self.chance(0.4):
            messages.insert(0, {"role": self.one(["system", "developer"]), "content": self.content()})
        body = {"model": "gpt-oss", "messages": messages}
        if self.chance(0.4):
            body["tools"] = [self.tool() for _ in range(self.random.randrange(1, 4))]
        if self.chance(0.3):
            body["reasoning_effort"] = self.one(["low", "medium", "high", "high", None, "none", "minimal"])
        if self.chance(0.1):
            body["add_generation_prompt"] = self.one([True, False])
        if self.chance(0.1):
            body["chat_template_kwargs"] = {"enable_thinking": False, "reasoning_effort": "low"}
        return body


def requests(count):
    """count made-up requests, the same each time."""
    chats = Chats(20261121)
    return (chats.body() for _ in range(count))


main(*sys.argv[1:])
