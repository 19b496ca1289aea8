"""Says what token ids an engine makes of requests for gpt-oss: its own pydantic models and harmony_utils, over oss-harmony.

    harmony.py vllm|sglang SOURCES DATE COUNT

SOURCES holds the engine's package, DATE is today (2026-11-21). Makes up requests, always the same, and answers each in a line:
{"body": ..., "ids": [...], "text": ...} or {"body": ..., "error": ...}. For vLLM these are COUNT chats and two thirds as many requests
to its other APIs, for SGLang COUNT requests to /v1/responses. A body with "input" is for /v1/responses, one with "max_tokens" for
/v1/messages.
"""

import base64
import copy
import importlib
import itertools
import json
import os
import random
import sys
import types
import zlib

# engines.py's definitions without its main.
engines = types.ModuleType("engines")
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "engines.py"), encoding="utf-8") as f:
    exec(compile(f.read().rsplit("\nmain(", 1)[0], "engines.py", "exec"), engines.__dict__)

UTILS = "vllm.entrypoints.openai.parser.harmony_utils"
RENDERER = "vllm.renderers.online_renderer"


def main(engine, sources, date, count):
    {"vllm": vllm, "sglang": sglang}[engine](sources, date, int(count))


def answer(bodies, ids, encoding):
    """Prints the answers of ids, a function of a body."""
    for body in bodies:
        try:
            tokens = ids(copy.deepcopy(body))
            line = {"body": body, "ids": tokens, "text": encoding.decode(tokens)}
        except Exception as e:
            line = {"body": body, "error": "%s: %s" % (type(e).__name__, str(e)[:100])}
        print(json.dumps(line), flush=True)


def sglang(sources, date, count):
    engines.REAL["sglang"].append("sglang.srt.entrypoints.harmony_utils")
    engines.stand_in("sglang", sources)
    import sglang.srt.entrypoints.harmony_utils as utils
    import sglang.srt.entrypoints.openai.protocol as protocol
    import sglang.srt.entrypoints.openai.serving_responses as serving_responses

    assert date == utils.datetime.datetime.now().strftime("%Y-%m-%d")
    serving = serving_responses.OpenAIServingResponses.__new__(serving_responses.OpenAIServingResponses)
    serving.tool_server = None

    def responses(body):
        """OpenAIServingResponses._make_request_with_harmony, for a server without tools of its own."""
        request = protocol.ResponsesRequest.model_validate(body)
        # As create_responses does.
        if request.previous_response_id is not None or any(tool.type in ("web_search", "web_search_preview", "shell") for tool in request.tools):
            raise ValueError("not rendered")
        return serving._make_request_with_harmony(request, None)[2][0]

    chats = SGLangChats(6)
    answer((chats.responses() for _ in range(count)), responses, utils.get_encoding())


def vllm(sources, date, count):
    engines.REAL["vllm"] = [name for name in engines.REAL["vllm"] if name != "vllm.renderers.hf"]
    engines.REAL["vllm"] += [UTILS, RENDERER, "vllm.entrypoints.openai.responses.harmony"]
    engines.REAL["vllm"] = list(dict.fromkeys(engines.REAL["vllm"]))
    engines.stand_in("vllm", sources)
    import vllm.envs

    vllm.envs.VLLM_MAX_STOP_STRINGS = 128
    vllm.envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS = False
    vllm.envs.VLLM_SYSTEM_START_DATE = date
    import vllm.renderers
    import vllm.renderers.params as params

    for name in ("ChatParams", "TokenizeParams", "ReasoningEffort", "merge_kwargs", "map_reasoning_effort"):
        if hasattr(params, name):  # the efforts came with 0.33
            setattr(vllm.renderers, name, getattr(params, name))
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    utils, online = importlib.import_module(UTILS), importlib.import_module(RENDERER)
    renderer = online.OnlineRenderer.__new__(online.OnlineRenderer)
    renderer.parser = renderer.reasoning_effort_map = None
    renderer.renderer = types.SimpleNamespace(tokenizer=None)
    renderer.create_error_response = lambda message, **more: ValueError(message)
    online.tokens_input = lambda ids, cache_salt: {"ids": ids}
    online.TokensPrompt = dict
    online.ResponsesRenderResult = lambda messages, engine_input: engine_input
    renderer.model_config = types.SimpleNamespace(max_model_len=1 << 20)

    def responses(body):
        """OnlineRenderer._render_responses_with_harmony, for a server without tools of its own."""
        request = ResponsesRequest.model_validate(body)
        result = renderer._render_responses_with_harmony(request, previous_messages=None, previous_response_outputs=None, tool_server=None)
        if isinstance(result, Exception):
            raise result
        return result["ids"]

    import vllm.entrypoints.anthropic.protocol as anthropic
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    def messages(body):
        """After AnthropicServingMessages.create_messages, for a folder without a template."""
        request = anthropic.AnthropicMessagesRequest.model_validate(body)
        return chat(AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=True, disabled_thinking_effort="low"))

    def ids(body):
        return chat(ChatCompletionRequest.model_validate(body))

    def chat(request):
        """After OnlineRenderer._make_request_with_harmony, tokenizers.mistral.maybe_serialize_tool_calls before it."""
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

    answer(requests(count), lambda body: (responses if "input" in body else messages if "max_tokens" in body else ids)(body), utils.get_encoding())


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

    def parts(self, kind):
        if self.chance(0.5):
            return self.text()
        return [{"type": kind, "text": self.text()} for _ in range(self.random.randrange(0 if self.chance(0.2) else 1, 4))]

    def item(self):
        kind = self.one(["user", "user", "user", "assistant", "assistant", "developer", "system", "call", "call", "output", "reasoning", "other" if self.chance(0.2) else "user"])
        if kind == "call":
            return {"type": "function_call", "call_id": "call_%d" % self.random.randrange(3), "name": self.one(NAMES), "arguments": self.one(['{"a": 1}', "", "{}", "not json <|call|>"])}
        if kind == "output":
            return {"type": "function_call_output", "call_id": "call_%d" % self.random.randrange(3), "output": self.text()}
        if kind == "reasoning":
            item = {"type": "reasoning", "summary": self.one([[], [{"type": "summary_text", "text": "short"}]])}
            if self.chance(0.7):
                item["content"] = self.one([None, [], [{"type": "reasoning_text", "text": self.text()} for _ in range(self.random.randrange(1, 3))]])
            return item
        item = {"role": kind, "content": self.parts("output_text" if kind == "assistant" else "input_text")}
        if kind == "assistant" and isinstance(item["content"], list) or self.chance(0.5):
            item["type"] = "message"
        return item

    def responses(self):
        items = [self.item() for _ in range(self.random.randrange(1, 8))]
        for place in range(len(items) - 1, -1, -1):  # most outputs are those of a call
            if items[place].get("type") == "function_call_output" and self.chance(0.9):
                items.insert(self.random.randrange(place + 1), {"type": "function_call", "call_id": items[place]["call_id"], "name": self.one(NAMES), "arguments": "{}"})
        body = {"model": "gpt-oss", "input": self.text() if self.chance(0.1) else items}
        if self.chance(0.5):
            body["instructions"] = self.one([self.text(), "", None])
        if self.chance(0.4):
            body["tools"] = [{"type": "function", **tool["function"]} for tool in (self.tool() for _ in range(self.random.randrange(0, 4)))]
            body["tool_choice"] = self.one(["auto", "none"])
        if self.chance(0.3):
            body["reasoning"] = {"effort": self.one(["low", "medium", "high", "high", None, "none", "minimal"])}
        return body

    def blocks(self, role):
        blocks = [{"type": "text", "text": self.text()} for _ in range(self.random.randrange(3))]
        if role == "assistant":
            if self.chance(0.4):
                blocks.insert(0, {"type": "thinking", "thinking": self.text(), "signature": "s"})
            for _ in range(self.random.randrange(3)):
                blocks.append({"type": "tool_use", "id": "call_%d" % self.random.randrange(3), "name": self.one(NAMES),
                               "input": {self.text(): self.value() for _ in range(self.random.randrange(3))}})
        else:
            for _ in range(self.random.randrange(2)):
                blocks.insert(self.random.randrange(len(blocks) + 1), {
                    "type": "tool_result", "tool_use_id": "call_%d" % self.random.randrange(3), "content": self.one([self.text(), [{"type": "text", "text": self.text()}]])})
        return blocks

    def anthropic(self):
        turns = []
        for _ in range(self.random.randrange(1, 7)):
            role = self.one(["user", "user", "assistant", "assistant", "system" if self.chance(0.3) else "user"])
            turns.append({"role": role, "content": self.text() if role == "system" or self.chance(0.4) else self.blocks(role)})
        body = {"model": "gpt-oss", "max_tokens": 4096, "messages": turns}
        if self.chance(0.5):
            body["system"] = self.one([self.text(), [{"type": "text", "text": self.text()}]])
        if self.chance(0.4):
            body["tools"] = [{"name": self.one(NAMES), "description": self.one([self.text(), None]), "input_schema": self.schema()} for _ in range(self.random.randrange(1, 4))]
        if self.chance(0.3):
            body["output_config"] = {"effort": self.one(["low", "medium", "high", "max"])}
        if self.chance(0.2):
            body["thinking"] = self.one([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
        return body


class SGLangChats(Chats):
    """Makes requests to /v1/responses, with what SGLang alone reads."""

    def item(self):
        if self.chance(0.15):
            return self.one([
                {"type": "custom_tool_call", "call_id": "call_%d" % self.random.randrange(3), "name": self.one(NAMES), "input": self.text()},
                {"type": "custom_tool_call_output", "call_id": "call_%d" % self.random.randrange(3), "output": self.text()},
                {"type": "function_call_output", "call_id": "call_%d" % self.random.randrange(3),
                 "output": [{"type": "input_text", "text": self.text()} for _ in range(self.random.randrange(3))]},
                {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": self.one([
                    "other", "sglang-reasoning-v1.AAAA", "sglang-reasoning-v1." + base64.urlsafe_b64encode(zlib.compress(self.text().encode())).decode()])},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": self.one(["", self.text()])} for _ in range(self.random.randrange(3))]},
                {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [
                    {"type": "output_text", "text": self.text(), "annotations": []} for _ in range(self.random.randrange(3))]},
            ])
        item = super().item()
        if item.get("role") == "assistant" and self.chance(0.7):
            item["phase"] = self.one(["commentary", "final_answer", "final_answer", None])
        if item.get("role") == "user" and self.chance(0.05):
            item["phase"] = "commentary"
        if item.get("type") == "function_call" and self.chance(0.1):
            item["id"], item["status"] = "fc_1", "completed"
        return item

    def responses(self):
        body = super().responses()
        for tool in body.get("tools", []):
            if tool.get("description") is None and self.chance(0.95):  # refused by oss-harmony
                tool["description"] = self.text()
        if self.chance(0.1):
            body["reasoning"] = self.one([{"effort": "xhigh"}, {"effort": "max"}, {"effort": "ultra"}, {"summary": "auto"}, {}])
        if body.get("tool_choice") == "none" and self.chance(0.8):
            body["tool_choice"] = self.one(["auto", {"type": "mcp", "server_label": "s"}, {"type": "function", "name": "f"}])
        if "tools" in body and self.chance(0.3):
            body["tools"].append(self.one([{"type": "custom", "name": "c", "description": "d"}, {"type": "mcp", "server_label": "s"}, {"type": "file_search"}]))
        if self.chance(0.05):
            body["chat_template_kwargs"], body["stop"] = {"enable_thinking": False, "reasoning_effort": "low"}, "x"
        return body


def requests(count):
    """count made-up requests, the same each time: chats, and behind them a third as many each for the other APIs."""
    chats, responses, messages = Chats(20261121), Chats(4), Chats(5)
    third = range(count // 3)
    return itertools.chain((chats.body() for _ in range(count)), (responses.responses() for _ in third), (messages.anthropic() for _ in third))


main(*sys.argv[1:])
