"""Says what token ids vLLM makes of requests to models with Mistral's own tokenizer: its own pydantic models and renderers, over
mistral-common.

    mistral.py SOURCES FOLDER COUNT

SOURCES holds vLLM's package. Makes tokenizers of every version that tekken has, from the files inside mistral-common, each in a folder
of its own in FOLDER: "whole" has the whole vocabulary of a file as it is, the others its first tokens and the special tokens that the
version needs. Then makes up COUNT chats for each version and a quarter of that for its variants, always the same, and a sixth as many
requests for each of the other APIs, and answers each in a line: {"folder": ..., "body": ..., "ids": [...]} or {"folder": ..., "body": ..., "error": ...}. A body with "input" is for
/v1/responses, one with "max_tokens" for /v1/messages, one with "prompt" for /v1/completions. In the answer to a body with images or
sound, the ids are those before the first of them. Folders that begin with "bytes-" have a vocabulary of bytes alone; the answers also
have the text, for the golden file of package tokenizer.
"""

import asyncio
import base64
import copy
import importlib
import io
import itertools
import json
import os
import random
import sys
import types

import numpy

# engines.py's definitions without its main.
engines = types.ModuleType("engines")
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "engines.py"), encoding="utf-8") as f:
    exec(compile(f.read().rsplit("\nmain(", 1)[0], "engines.py", "exec"), engines.__dict__)

RENDERER = "vllm.renderers.online_renderer"

# The special tokens of the versions, in the order of their ids.
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
           "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
           "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
LATER = ["<SPECIAL_20>", "<SPECIAL_21>", "<SPECIAL_22>", "<SPECIAL_23>", "[AUDIO]", "[BEGIN_AUDIO]", "<SPECIAL_26>", "<SPECIAL_27>",
         "<SPECIAL_28>", "<SPECIAL_29>", "<SPECIAL_30>", "<SPECIAL_31>", "[ARGS]", "[CALL_ID]"]
THINK = ["[THINK]", "[/THINK]"]
SETTINGS = ["[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"]
EFFORTS = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}

# By folder: the version, the special tokens (None: those that mistral-common has for files without), whether it takes images, and the
# builder of the model's settings.
FOLDERS = {
    "v3": ("v3", None, True, None),
    "v7": ("v7", None, True, None),
    "v7-listed": ("v7", SPECIAL, False, None),
    "v11": ("v11", SPECIAL + LATER, True, None),
    "v13": ("v13", SPECIAL + LATER + THINK, True, None),
    "v13-plain": ("v13", SPECIAL + LATER, False, None),
    "v15": ("v15", SPECIAL + LATER + THINK + SETTINGS, True, {"reasoning_effort": EFFORTS}),
    "v15-open": ("v15", SPECIAL + LATER + THINK + SETTINGS, False, {
        "reasoning_effort": {**EFFORTS, "default": "medium", "values": ["low", "medium", "high"]},
        "json_schema": {"type": "json_schema", "accepts_none": False, "default": None}}),
    "v15-unset": ("v15", SPECIAL + LATER + THINK + SETTINGS, False, {"reasoning_effort": None}),
}


def make_folders(folder):
    import mistral_common

    with open(os.path.join(os.path.dirname(mistral_common.__file__), "data", "tekken_240911.json"), encoding="utf-8") as f:
        whole = json.load(f)
    contents = {"whole": whole}
    sizes = {**{name: (8200, 9000) for name in FOLDERS}, **{"bytes-" + name: (256, 1256) for name in FOLDERS}}
    for name, (vocabulary, size) in sizes.items():
        version, special, images, settings = FOLDERS[name.removeprefix("bytes-")]
        made = {"config": {**whole["config"], "version": version, "default_vocab_size": size}, "vocab": whole["vocab"][:vocabulary]}
        if special:
            made["special_tokens"] = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(special)]
        if images:
            # Later versions call the field differently.
            made["multimodal" if version == "v7" else "image"] = {"image_patch_size": 16, "max_image_size": 64}
        if settings is not None:
            made["model_settings_builder"] = settings
        contents[name] = made
    for name, content in contents.items():
        os.makedirs(os.path.join(folder, name))
        with open(os.path.join(folder, name, "tekken.json"), "w", encoding="utf-8") as f:
            json.dump(content, f)
    return list(contents)


def chat_modules():
    """The modules with parse_chat_messages and with the tracker of media, which moved with 0.32 and with 0.33."""
    if "vllm.renderers.chat_utils.chat_message" in engines.REAL["vllm"]:
        return [importlib.import_module("vllm.renderers.chat_utils." + name) for name in ("chat_message", "item_tracker")]
    name = next(name for name in ("vllm.renderers.chat_utils", "vllm.entrypoints.chat_utils") if name in engines.REAL["vllm"])
    return [importlib.import_module(name)] * 2


def main(sources, folder, count):
    for name in ("mistral_common", "PIL", "jsonschema"):
        engines.ABSENT.remove(name)
    engines.REAL["vllm"] = [name for name in engines.REAL["vllm"] if name != "vllm.renderers.hf"]
    engines.REAL["vllm"] += [RENDERER, "vllm.renderers.mistral", "vllm.tokenizers.mistral", "vllm.utils.mistral"]
    engines.stand_in("vllm", sources)
    import vllm.envs

    vllm.envs.VLLM_MAX_STOP_STRINGS = 128
    import vllm.renderers
    import vllm.renderers.params as params

    for name in ("ChatParams", "TokenizeParams", "ReasoningEffort", "merge_kwargs", "map_reasoning_effort"):
        if hasattr(params, name):  # the efforts came with 0.33
            setattr(vllm.renderers, name, getattr(params, name))
    import vllm.tokenizers.mistral as mistral
    import vllm.utils.mistral

    vllm.utils.mistral.mt = mistral
    import vllm.entrypoints.anthropic.protocol as anthropic
    import vllm.renderers.mistral as renderers
    import vllm.entrypoints.anthropic.serving as serving
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    chat_utils, trackers = chat_modules()

    online = importlib.import_module(RENDERER)
    renderers.parse_dec_only_prompt = lambda ids: {"ids": ids}
    renderers.parse_chat_messages = chat_utils.parse_chat_messages
    online.ResponsesRenderResult = lambda messages, engine_input: engine_input
    online.validate_request_mm_kwargs = lambda **given: None
    import mistral_common.tokens.tokenizers.image as images

    images.transform_image = lambda image, size: numpy.zeros(1)  # what the model sees, which needs more packages
    trackers.BaseMultiModalItemTracker.model_cls = property(
        lambda tracker: types.SimpleNamespace(get_placeholder_str=lambda modality, i: None))

    class Renderer:
        """The renderer without what follows the ids."""

        def __init__(self, folder):
            self.tokenizer = mistral.MistralTokenizer.from_pretrained(folder)
            self.model_config = types.SimpleNamespace(
                multimodal_config=None, enable_prompt_embeds=False, is_multimodal_model=True, allowed_local_media_path="", model="m",
                allowed_media_domains=None, max_model_len=1 << 20, hf_config=types.SimpleNamespace(model_type="mistral3"))

        def get_tokenizer(self):
            return self.tokenizer

        async def render_chat_async(self, conversations, chat_params, tok_params, prompt_extras, skip_mm_cache):
            conversation, prompt = renderers.MistralRenderer.render_messages(self, conversations[0], chat_params)
            return [conversation], [prompt]

    def server(folder):
        made = online.OnlineRenderer.__new__(online.OnlineRenderer)
        made.renderer = Renderer(folder)
        made.model_config = made.renderer.model_config
        made.parser, made.chat_template, made.chat_template_content_format = None, None, "auto"
        made.enable_auto_tools = made.exclude_tools_when_tool_choice_none = made.use_harmony = made.trust_request_chat_template = False
        made.trust_request_mm_kwargs = False
        made.default_chat_template_kwargs, made.reasoning_effort_map = {}, {}
        made.create_error_response = lambda message, *more, **named: ValueError(message)
        made.disabled = serving.AnthropicServingMessages.__new__(serving.AnthropicServingMessages) if older else serving.DisabledThinkingEffortResolver(made)

        async def probed(effort):
            try:
                return await rendered(made, ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort))
            except Exception:
                return None

        made.disabled._render_probe_prompt = probed
        return made

    async def rendered(server, request):
        result = await server.render_chat(request)
        if isinstance(result, Exception):
            raise result
        return result[1][0]["ids"]

    async def ids(server, body):
        tekken = server.renderer.tokenizer
        if "prompt" in body:
            return tekken.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        if "input" in body:
            request = ResponsesRequest.model_validate(body)
            if request.previous_response_id is not None or request.truncation != "disabled":
                raise ValueError("not rendered")
            result = await server.render_responses(request)
            if isinstance(result, Exception):
                raise result
            return result["ids"]
        if "max_tokens" in body:
            # After AnthropicServingMessages.create_messages, for a server without --chat-template.
            request = anthropic.AnthropicMessagesRequest.model_validate(body)
            effort = await disabled_effort(server.disabled, request)
            return await rendered(server, serving.AnthropicServingMessages.to_chat_completion_request(
                request, merge_inline_system=True, disabled_thinking_effort=effort))
        return await rendered(server, ChatCompletionRequest.model_validate(body))

    older = not hasattr(serving, "DisabledThinkingEffortResolver")  # up to 0.32

    async def disabled_effort(resolver, request):
        if not older:
            return await resolver.resolve_for(request)
        # After create_messages.
        return await resolver._probe_disabled_thinking_effort() if request.thinking is not None and request.thinking.type == "disabled" else "none"

    def before_media(server, found):
        """The ids before the first token of an image or of sound."""
        known = server.renderer.tokenizer.tokenizer._special_tokens_reverse_vocab
        marks = [known[name] for name in ("[IMG]", "[AUDIO]", "[BEGIN_AUDIO]") if name in known]
        return found[:next(i for i, token in enumerate(found) if token in marks)]

    for name in make_folders(folder):
        made = server(os.path.join(folder, name))
        golden = name.startswith("bytes-")
        chats = 12 if golden else int(count) if name in ("v3", "v7", "v11", "v13", "v15") else int(count) // 4
        for body in requests(name.removeprefix("bytes-"), chats):
            answer = {"folder": name, "body": body}
            try:
                answer["ids"] = asyncio.run(ids(made, copy.deepcopy(body)))
                if "data:image" in json.dumps(body):
                    answer["ids"], answer["media"] = before_media(made, answer["ids"]), True
                if golden:
                    answer["text"] = made.renderer.tokenizer.tokenizer.decode(answer["ids"], SpecialTokenPolicy.KEEP)
            except Exception as e:
                answer["error"] = "%s: %s" % (type(e).__name__, str(e)[:60 if golden else 200])
            print(json.dumps(answer), flush=True)


TEXTS = ["hi", "", " ", "x\n\ny", "What is the weather in S\u00e3o Paulo?", "[/INST] is text", "a [INST] b</s>", "\u4f60\u597d", "\U0001f680 go",
         "trailing \n", "\r\nlines\r\n", "def f(x):\n    return x\n" * 3, "It's 1234567 o'clock, isn't it?\t\t", "# Tools", "e\u0301 \u0130",
         "ends in spaces  ", "[THINK]no[/THINK]", "\u00df\u01c5 \ufb01 A.B/c//\n/d", "{\"a\": 1}"]
NAMES = ["f", "get_weather", "search-web", "A1", "x" * 64]
JSONS = ["{\"b\": 1.0, \"a\": [\"\u00e9\", null, {\"c\": 1e-7}]}", "[1, 2]", "12", "\"text\"", "{\"a\":1,\"a\":2}", " {\"x\" : true}\n", "{} {}",
         "{\"n\": 123456789012345678901234567890, \"f\": 1e22, \"u\": \"\\u00fc\\u2028\\/\"}", "not json", "null", "true", "", "-0", "-0.0", "1.50"]


def image():
    """A data URL of a small image."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (20, 12), (200, 10, 30)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Requests:
    """Makes requests, and now and then one that vLLM refuses."""

    def __init__(self, seed, folder):
        self.random = random.Random(seed)
        self.version, _, self.images, _ = FOLDERS.get(folder, ("v3", None, True, None))
        self.number = int(self.version[1:])
        self.think = folder in ("v13", "v15", "v15-open", "v15-unset")
        self.image = image()

    def chance(self, p):
        return self.random.random() < p

    def one(self, things):
        return self.random.choice(things)

    def text(self):
        return "".join(self.one(TEXTS) for _ in range(self.random.randrange(1, 4)))

    def parts(self, *more):
        parts = [{"type": "text", "text": self.text()} for _ in range(self.random.randrange(0 if self.chance(0.2) else 1, 4))]
        for part in more:
            parts.insert(self.random.randrange(len(parts) + 1), part)
        if self.chance(0.01):
            parts.append(self.one([{"type": "refusal", "refusal": "no"}, {"type": "input_text", "text": "x"}, "a string", {"text": "untyped"},
                                   {"type": "text", "text": None}, {"type": "text", "text": "y", "unknown": 1}, {"type": "thinking", "thinking": "hm"}]))
        return parts

    def said(self, parts):
        return any(isinstance(part, dict) and part.get("text") for part in parts)

    def content(self):
        return self.text() if self.chance(0.65) else self.parts()

    def call_id(self):
        if self.chance(0.008):
            return self.one(["null", "short", "", "abc-efghi", "\u00e9bcdefghi"])
        prefix = self.one(["", "call_", "toolu_01", "chatcmpl-tool-"])
        return prefix + "".join(self.one("abcXYZ019") for _ in range(9))

    def call(self, call_id):
        arguments = self.one(JSONS) if self.chance(0.5) else json.dumps({self.one(NAMES): self.value() for _ in range(self.random.randrange(3))})
        call = {"id": call_id, "type": "function", "function": {"name": self.one(NAMES) if self.chance(0.99) else self.one(["", "a b", "f\u00fc", "y" * 65, "f\n"]),
                                                                "arguments": arguments}}
        if self.chance(0.05):
            call["index"] = 0
        return call

    def value(self, depth=0):
        kinds = [None, True, False, 0, -7, 10**15, 1 << 63, 1.5, 0.1, 1e16, 2.5e-7, 100.0, "a", "q\"\\\n\u0001\u00e9/\u2028\x7f", ""]
        if depth < 2 and self.chance(0.3):
            return self.one([lambda: [self.value(depth + 1) for _ in range(self.random.randrange(3))],
                             lambda: {self.one(NAMES): self.value(depth + 1) for _ in range(self.random.randrange(3))}])()
        return self.one(kinds)

    def schema(self, depth=0):
        kind = self.one(["string", "number", "integer", "boolean", "array", "object", "null"])
        schema = {"type": kind}
        if self.chance(0.4):
            schema["description"] = self.one(["what", "two\nlines", "", "\u00fcber <b>&amp;</b>"])
        if self.chance(0.2):
            schema["default"] = self.value()
        if self.chance(0.2):
            schema["enum"] = [self.value() for _ in range(2)]
        if depth < 3 and kind == "object":
            schema["properties"] = {self.one(["a", "b", "c", "city", "l\u00e4nge"]): self.schema(depth + 1) for _ in range(self.random.randrange(4))}
        if depth < 3 and kind == "array":
            schema["items"] = self.schema(depth + 1)
        return schema

    def tool(self):
        function = {"name": self.one(NAMES) if self.chance(0.98) else "a b"}
        if self.chance(0.8):
            function["description"] = self.one(["Does it.", "Two\nlines", "", None])
        if self.chance(0.8):
            function["parameters"] = self.one([{**self.schema(), "type": "object"}, {}, None])
        if self.chance(0.2):
            function["strict"] = self.one([True, False, None])
        if self.chance(0.05):
            function["unknown"] = 1
        tool = {"type": "function", "function": function}
        if self.chance(0.05):
            tool["defer_loading"] = True
        return dict(reversed(tool.items())) if self.chance(0.1) else tool

    def assistant(self, calls=()):
        message = {"role": "assistant"}
        if self.chance(0.98):
            message["content"] = self.content()
            if not calls and self.chance(0.97) and not (message["content"] if isinstance(message["content"], str) else self.said(message["content"])):
                message["content"] = "said"
        if calls:
            message["tool_calls"] = list(calls)
            if self.number < 7 and self.chance(0.95) or self.chance(0.3):
                message["content"] = self.one([None, ""])
                if self.chance(0.3):
                    del message["content"]
        elif self.chance(0.1):
            message["tool_calls"] = self.one([[], None])
        if self.think and self.chance(0.35) or self.chance(0.02):
            message[self.one(["reasoning", "reasoning_content"])] = self.one(["thinking", "", None, self.text()])
            if self.chance(0.05):
                message["reasoning"] = "other"
        elif self.think and self.chance(0.25):
            thinking = {"type": "thinking", "thinking": self.text()}
            if self.chance(0.4):
                thinking["closed"] = self.one([True, False])
            message["content"] = [thinking, *self.parts()] if self.chance(0.8) else self.parts(thinking)
        if self.chance(0.03):
            message["name"] = "bob"
        if self.chance(0.03):
            message[self.one(["refusal", "prefix", "audio"])] = None
        return message

    def result(self, call_id):
        message = {"role": "tool", "tool_call_id": call_id, "content": self.one(JSONS) if self.chance(0.5) else self.content()}
        if self.chance(0.15):
            message["name"] = self.one(NAMES + [None])
        if self.number >= 15 and self.images and self.chance(0.05):
            message["content"] = self.parts({"type": "image_url", "image_url": {"url": self.image}})
        return message

    def user(self, images=False):
        message = {"role": "user", "content": self.content()}
        if images and self.chance(0.3):
            message["content"] = self.parts({"type": "image_url", "image_url": {"url": self.image}})
        if self.chance(0.02):
            message["name"] = "bob"
        return message

    def system(self):
        message = {"role": self.one(["system", "system", "developer"]), "content": self.content()}
        if 7 <= self.number < 15 and self.think and self.chance(0.15):
            message["content"] = self.parts({"type": "thinking", "thinking": self.text(), "closed": self.one([True, False])})
        if self.chance(0.05):
            message["content"] = "x-anthropic-billing-header: 1\nrest"
        return message

    def conversation(self, images=False):
        messages = [self.system() for _ in range(self.one([0, 0, 1, 1, 2]))]
        for _ in range(self.random.randrange(0, 4)):
            messages += [self.user(images) for _ in range(self.one([1, 1, 1, 2]))]
            if self.chance(0.1):
                messages.append(self.system())  # behind a user's message alone
                messages.append(self.user(images))
            for _ in range(self.one([0, 0, 1, 2])):
                ids = [self.call_id() for _ in range(self.one([1, 1, 2, 3]))]
                messages.append(self.assistant([self.call(i) for i in ids]))
                self.random.shuffle(ids) if self.chance(0.3) else None
                if self.chance(0.03):
                    ids = ids[:-1]
                messages += [self.result(i) for i in ids]
            messages += [self.assistant() for _ in range(self.one([1, 1, 1, 0, 2]))]
        if self.chance(0.85):
            messages.append(self.user(images))
        if self.chance(0.06) and messages:
            extra = self.one([self.user, self.system, self.assistant, lambda: self.result(self.call_id()), lambda: {"role": "robot", "content": "x"},
                              lambda: {"role": "user", "content": None}, lambda: {"role": "user"}])()
            messages.insert(self.random.randrange(len(messages) + 1), extra)
        if self.chance(0.03) and messages:
            del messages[self.random.randrange(len(messages))]
        return messages

    def chat(self):
        body = {"model": "m", "messages": self.conversation(self.images and self.chance(0.15))}
        if self.chance(0.4):
            body["tools"] = [self.tool() for _ in range(self.random.randrange(1, 4))]
            if self.chance(0.5):
                body["tool_choice"] = self.one(["auto", "none", "required"])
        if self.chance(0.25):
            body["reasoning_effort"] = self.one(["high", "high", "none", "low", None])
        last = body["messages"][-1:]
        if last and last[0].get("role") == "assistant" and self.chance(0.9):
            body["continue_final_message"], body["add_generation_prompt"] = True, False
        elif self.chance(0.1):
            body["add_generation_prompt"] = self.one([True, False])
        if self.chance(0.01):
            body["continue_final_message"] = True
        if self.chance(0.02):
            body["chat_template_kwargs"] = self.one([{}, {"enable_thinking": False}, None])
        if self.chance(0.05):
            body[self.one(["response_format", "documents", "cache_salt", "temperature"])] = None
        return body

    def item(self):
        kind = self.one(["user", "user", "user", "assistant", "assistant", "developer", "system", "call", "output", "reasoning"])
        if kind == "call":
            return {"type": "function_call", "call_id": self.call_id(), "name": self.one(NAMES), "arguments": self.one(JSONS)}
        if kind == "output":
            return {"type": "function_call_output", "call_id": self.call_id(), "output": self.text()}
        if kind == "reasoning":
            item = {"type": "reasoning", "summary": self.one([[], [{"type": "summary_text", "text": "short"}]])}
            if self.chance(0.7):
                item["content"] = self.one([None, [], [{"type": "reasoning_text", "text": self.text()} for _ in range(self.random.randrange(1, 3))]])
            return item
        item = {"role": kind, "content": self.text()}
        if self.chance(0.04):
            item["content"] = [{"type": "output_text" if kind == "assistant" else "input_text", "text": self.text()}]
        if kind == "assistant" and isinstance(item["content"], list) or self.chance(0.5):
            item["type"] = "message"
        return item

    def responses(self):
        items = [{"role": "user", "content": self.text()}]
        for _ in range(self.random.randrange(0, 5)):
            item = self.item()
            if item.get("type") in ("function_call", "reasoning") and self.number < 13 and self.chance(0.9):
                continue
            if item.get("type") == "function_call_output":
                call = {"type": "function_call", "call_id": item["call_id"], "name": self.one(NAMES), "arguments": self.one(JSONS)}
                items.append(call)
            items.append(item)
            if item.get("type") == "function_call" and self.chance(0.9):
                items.append({"type": "function_call_output", "call_id": item["call_id"], "output": self.text()})
        if self.chance(0.9):
            items.append({"role": "user", "content": self.text()})
        body = {"model": "m", "input": self.text() if self.chance(0.1) else items}
        if self.chance(0.5):
            body["instructions"] = self.one([self.text(), "", None])
        if self.chance(0.4):
            body["tools"] = [{"type": "function", **{k: v for k, v in tool["function"].items() if k != "unknown"}}
                             for tool in (self.tool() for _ in range(self.random.randrange(0, 4)))]
            body["tool_choice"] = self.one(["auto", "none"])
        if self.chance(0.3):
            body["reasoning"] = {"effort": self.one(["low", "medium", "high", "high", None, "none", "minimal"])}
        if self.chance(0.02):
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body

    def anthropic(self):
        turns = []
        for _ in range(self.random.randrange(1, 4)):
            turns.append({"role": "user", "content": self.text() if self.chance(0.5) else [{"type": "text", "text": self.text()} for _ in range(self.random.randrange(1, 3))]})
            if self.chance(0.1):
                turns.append({"role": "system", "content": self.text()})
            while self.chance(0.4):
                ids = [self.call_id() for _ in range(self.one([1, 1, 2]))]
                blocks = [{"type": "text", "text": self.text()}] if self.number >= 7 and self.chance(0.5) else []
                if self.think and self.chance(0.5):
                    blocks.insert(0, {"type": "thinking", "thinking": self.text(), "signature": "s"})
                blocks += [{"type": "tool_use", "id": i, "name": self.one(NAMES), "input": {self.one(NAMES): self.value() for _ in range(self.random.randrange(3))}} for i in ids]
                turns.append({"role": "assistant", "content": blocks})
                self.random.shuffle(ids) if self.chance(0.3) else None
                turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": self.one(
                    [self.text(), [{"type": "text", "text": self.text()}]])} for i in ids]})
            if self.chance(0.8):
                turns.append({"role": "assistant", "content": "said" + self.text() if self.chance(0.5) else [{"type": "text", "text": self.text()}]})
        if turns[-1]["role"] != "user" and self.chance(0.97):
            turns.append({"role": "user", "content": self.text()})
        body = {"model": "m", "max_tokens": 4096, "messages": turns}
        if self.chance(0.5):
            body["system"] = self.one([self.text(), [{"type": "text", "text": self.text()}]])
        if self.chance(0.4):
            body["tools"] = [{"name": self.one(NAMES), "description": self.one([self.text(), None]), "input_schema": {**self.schema(), "type": "object"}} for _ in range(self.random.randrange(1, 4))]
        if self.chance(0.2):
            body["output_config"] = {"effort": self.one(["low", "high", "high", "max"])}
        if self.chance(0.2):
            body["thinking"] = self.one([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
        return body

    def completion(self):
        body = {"model": "m", "prompt": self.text() + self.text()}
        if self.chance(0.3):
            body["add_special_tokens"] = self.one([True, False])
        return body


def requests(folder, count):
    """Made-up requests, the same each time: count chats, and behind them a sixth as many each for the other APIs."""
    chats, others, sixth = Requests(20261125, folder), Requests(4, folder), range(count // 6)
    return itertools.chain((chats.chat() for _ in range(count)), (others.responses() for _ in sixth), (others.anthropic() for _ in sixth),
                           (others.completion() for _ in sixth))


main(*sys.argv[1:])
