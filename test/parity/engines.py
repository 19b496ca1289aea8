"""Says what an engine's own code makes of requests, before it tokenizes them: its pydantic models, its parsing of messages, its
choice of a template's content format, and Transformers' rendering.

    engines.py vllm|sglang|trtllm SOURCES FOLDER

SOURCES holds the engine's package, FOLDER a tokenizer; a line {"folder": FOLDER} takes another one, without an answer. Reads a JSON
line for each request,
{"template": ..., "format": "auto", "defaults": {...} or null, "body": {...}} with vLLM's flags "exclude_tools": true and
"effort_map": {...} if they are set, with SGLang's "reasoning_parser" if it has one and "gpt_oss": true for that model, and with "messages" or "responses": true if the
body is for these APIs, and with "encoder" if the engine encodes the chat without a template: the tokenizer mode of vLLM, or the
architecture and the type of the model, by which SGLang chooses; and answers {"text": ..., "ids": [...]} or {"error": ...};
{"detect": TEMPLATE} answers {"format": ...}. With "endpoint": "render" or "tokenize" the answer is what the engine's endpoint of that
name makes of the body, in its own response's class. With "architecture" the model is of that one, which takes media, and the body may
hold some; nothing is fetched, and the ids are those before media's own take the places of marks. Only the modules named below are the engine's; what else they import (PyTorch,
kernels, servers) is stood in for, because nothing of it is called. TensorRT-LLM's code is on no registry, so that for it this file says
what its source says; OpenAI's types, pydantic and Transformers are the real ones.
"""

import ast
import collections
import functools
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import types

REAL = {
    "vllm": [
        "vllm.config.utils",
        "vllm.entrypoints.chat_utils",  # up to 0.31
        "vllm.entrypoints.anthropic.protocol",
        "vllm.entrypoints.anthropic.serving",
        "vllm.entrypoints.generate.base.protocol",
        "vllm.entrypoints.openai.chat_completion.protocol",
        "vllm.entrypoints.openai.responses.protocol",
        "vllm.entrypoints.openai.responses.utils",
        "vllm.entrypoints.openai.completion.protocol",
        "vllm.entrypoints.scale_out.token_in_token_out.protocol",
        "vllm.entrypoints.serve.engine.protocol",
        "vllm.entrypoints.serve.tokenize.protocol",
        "vllm.exceptions",
        "vllm.renderers.chat_utils",
        "vllm.renderers.chat_utils.chat_message",
        "vllm.renderers.chat_utils.chat_template",
        "vllm.renderers.chat_utils.content_parser",
        "vllm.renderers.chat_utils.item_tracker",
        "vllm.renderers.chat_utils.tool_call",
        "vllm.renderers.chat_utils.types",
        "vllm.renderers.deepseek_v32",
        "vllm.renderers.deepseek_v4",
        "vllm.renderers.hf",
        "vllm.renderers.inkling",
        "vllm.renderers.inkling_encoding",
        "vllm.renderers.inputs.preprocess",
        "vllm.renderers.params",
        "vllm.tokenizers.deepseek_v32",
        "vllm.tokenizers.deepseek_v32_encoding",
        "vllm.tokenizers.deepseek_v4",
        "vllm.tokenizers.deepseek_v4_encoding",
        "vllm.tool_parsers.utils",
        "vllm.utils.collection_utils",
        "vllm.utils.func_utils",
    ],
    "sglang": [
        "sglang.srt.entrypoints.anthropic.protocol",
        "sglang.srt.entrypoints.anthropic.serving",
        "sglang.srt.entrypoints.openai.chat_encoding",
        "sglang.srt.entrypoints.openai.encoding_dsv32",
        "sglang.srt.entrypoints.openai.encoding_dsv4",
        "sglang.srt.entrypoints.openai.encoding_dsv41",
        "sglang.srt.entrypoints.openai.parallel_prompt_encode",
        "sglang.srt.entrypoints.openai.protocol",
        "sglang.srt.entrypoints.openai.responses_adapters",
        "sglang.srt.entrypoints.openai.serving_chat",
        "sglang.srt.entrypoints.openai.serving_completions",
        "sglang.srt.entrypoints.openai.serving_responses",
        "sglang.srt.entrypoints.openai.serving_tokenize",
        "sglang.srt.parser.glm53_chat_template",
        "sglang.srt.parser.hunyuan_reasoning",
        "sglang.srt.parser.inkling_renderer",
        "sglang.srt.parser.inkling_tokenizer",
        "sglang.srt.parser.jinja_template_utils",
        "sglang.srt.parser.python_chat_template",
        "sglang.srt.parser.template_detection",
    ],
}
ABSENT = ["torch", "PIL", "zmq", "msgspec", "cbor2", "prometheus_client", "cachetools", "cloudpickle", "psutil", "fastapi"]
ABSENT += ["starlette", "uvicorn", "mistral_common", "xgrammar", "partial_json_parser", "sgl_kernel", "triton", "pybase64", "jsonschema"]


class StubMeta(type):
    """Makes classes that have every attribute, and that as decorators give back what they decorate."""

    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return stub(name)

    def __call__(cls, *args, **kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
            return args[0]
        return super().__call__(*args, **kwargs)

    def __or__(cls, other):
        return object

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


def stub(name):
    def attribute(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return stub(name)

    def schema(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    return StubMeta(name, (), {
        "__init__": lambda self, *args, **kwargs: None,
        "__getattr__": attribute,
        "__call__": lambda self, *args, **kwargs: args[0] if len(args) == 1 and callable(args[0]) else stub(name)(),
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__get_pydantic_core_schema__": classmethod(schema),
    })


class StubModule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = stub(name)
        setattr(self, name, value)
        return value


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, engine):
        self.engine = engine

    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top == "msgspec" and self.engine == "sglang":  # the base of classes since 0.5.23
            return None
        if top == self.engine and name in REAL[top] or top != self.engine and top not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module):
        pass


def stand_in(engine, sources):
    """Makes importable what REAL lists. The packages around those modules are empty, but say where they are."""
    if any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        return
    REAL[engine] = [name for name in REAL[engine] if any(
        os.path.exists(sources + "/" + name.replace(".", "/") + end) for end in (".py", "/__init__.py"))]
    sys.meta_path.insert(0, StubFinder(engine))
    packages = {name.rsplit(".", depth)[0] for name in REAL[engine] for depth in range(1, name.count(".") + 1)} - set(REAL[engine])
    for name in sorted(packages):
        module = StubModule(name)
        module.__path__ = [sources + "/" + name.replace(".", "/")]
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


class VLLM:
    def __init__(self, sources, tokenizer):
        stand_in("vllm", sources)
        import vllm.envs

        vllm.envs.VLLM_MAX_STOP_STRINGS, vllm.envs.VLLM_MAX_COMPLETION_PROMPTS = 128, 1024
        import vllm.renderers
        import vllm.renderers.params as params

        for name in ("ChatParams", "TokenizeParams", "ReasoningEffort", "merge_kwargs", "map_reasoning_effort"):
            if hasattr(params, name):  # the efforts came with 0.33
                setattr(vllm.renderers, name, getattr(params, name))
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        import pydantic
        import vllm.entrypoints.openai.completion.protocol as completion
        import vllm.entrypoints.scale_out.token_in_token_out.protocol as generate
        import vllm.entrypoints.serve.tokenize.protocol as tokenize
        import vllm.renderers.hf as hf

        self.completion, self.generate, self.tokenize_protocol = completion, generate, tokenize
        # Kept, because what it validates lazily needs it, as FastAPI keeps it.
        self.tokenize_request = pydantic.TypeAdapter(tokenize.TokenizeRequest)
        self.request, self.hf, self.merge, self.tokenizer = ChatCompletionRequest, hf, params.merge_kwargs, tokenizer
        self.config = types.SimpleNamespace(
            tokenizer_revision=None, revision=None, code_revision=None, trust_remote_code=False, multimodal_config=None,
            enable_prompt_embeds=False, model="m", tokenizer="m", hf_config=types.SimpleNamespace(model_type="llama"), max_model_len=1 << 20,
            is_multimodal_model=True, allowed_local_media_path="", allowed_media_domains=None,
        )
        self.models = sources + "/vllm/model_executor/models/"
        for module in ("vllm.renderers.chat_utils.item_tracker", "vllm.renderers.chat_utils", "vllm.entrypoints.chat_utils"):
            if module in REAL["vllm"]:  # it moved with 0.32 and with 0.33
                item_tracker = importlib.import_module(module)
                break
        item_tracker.BaseMultiModalItemTracker.model_cls = property(
            lambda tracker: types.SimpleNamespace(get_placeholder_str=self.placeholder))
        self.placeholder = self.encoder = self.detected = None

    def use(self, tokenizer):
        """Takes another tokenizer."""
        self.tokenizer = tokenizer

    def parse(self, module):
        with open(self.models + module + ".py") as file:
            return ast.parse(file.read())

    @functools.cache  # reading the sources takes longer than a request
    def placeholder_of(self, architecture):
        """The method of the model's class that says what stands for media in a text, without the class around it."""
        for node in ast.walk(self.parse("registry")):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values):
                    if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple):
                        return self.method(*[name.value for name in value.elts[:2]])
        raise LookupError(architecture)

    def method(self, module, name):
        tree = self.parse(module)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                return self.method(node.module, name)
            if not isinstance(node, ast.ClassDef) or node.name != name:
                continue
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "get_placeholder_str":
                    member.decorator_list = []
                    scope = {}
                    exec(compile(ast.Module([member], []), module, "exec"), scope)
                    return lambda modality, i: scope["get_placeholder_str"](None, modality, i)
            for base in node.bases:
                found = isinstance(base, ast.Name) and self.method(module, base.id)
                if found:
                    return found
        return None

    def detect(self, template):
        return self.hf._detect_content_format(template, default="string")

    # The tokenizer mode of an encoder, its renderer's module and class, and what wraps the tokenizer for it.
    ENCODERS = {
        "deepseek_v32": ("deepseek_v32", "DeepseekV32Renderer", "get_deepseek_v32_tokenizer"),
        "deepseek_v4": ("deepseek_v4", "DeepseekV4Renderer", "get_deepseek_v4_tokenizer"),
    }

    def encode_chat(self, request, params):
        """What the renderer of the tokenizer mode in self.encoder does, with the engine's own encoder below it."""
        if self.encoder == "inkling":
            return self.inkling(request, params)
        module, name, wrap = self.ENCODERS[self.encoder]
        renderers = importlib.import_module("vllm.renderers." + module)
        renderers.parse_dec_only_prompt = lambda prompt: {"prompt": prompt}
        renderer = object.__new__(getattr(renderers, name))
        wrapped = getattr(importlib.import_module("vllm.tokenizers." + self.encoder), wrap)(self.tokenizer)
        renderer.__dict__.update(model_config=self.config, get_tokenizer=lambda: wrapped)
        prompt = renderer.render_messages(request.messages, params)[1]
        if prompt.get("multi_modal_data"):
            raise ValueError("media")
        return prompt["prompt"]

    def inkling(self, request, params):
        """InklingRenderer.render_messages, up to the first image or sound."""
        import vllm.renderers.inkling as inkling

        inkling.parse_dec_only_prompt = lambda ids: {"ids": ids}
        inkling.parse_chat_messages = self.hf.parse_chat_messages
        self.placeholder = lambda modality, i: None
        renderer = object.__new__(inkling.InklingRenderer)
        renderer.__dict__.update(model_config=self.config, _inkling_tokenizer=inkling._HfBackedTmlTokenizer(self.tokenizer))
        ids = renderer.render_messages(request.messages, params)[1]["ids"]
        marks = [self.tokenizer.convert_tokens_to_ids(mark) for mark in ("<|content_image|>", "<|content_audio_input|>")]
        media = any(part.get("type") == "image_url" for message in request.messages if isinstance(message.get("content"), list) for part in message["content"])
        return ids[:next((i for i, token in enumerate(ids) if media and token in marks), len(ids))]

    def messages(self, template, given_format, defaults, body, flags):
        """After AnthropicServingMessages.create_messages."""
        import asyncio

        import vllm.entrypoints.anthropic.protocol as protocol
        import vllm.entrypoints.anthropic.serving as serving

        async def probed(effort):
            request = self.request(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
            try:
                return self.chat(request, given_format, defaults, **flags)
            except Exception:
                return None

        request = protocol.AnthropicMessagesRequest.model_validate(body)
        if hasattr(serving, "DisabledThinkingEffortResolver"):
            resolver = serving.DisabledThinkingEffortResolver(None)
            resolver._render_probe_prompt = probed
            effort = asyncio.run(resolver.resolve_for(request))
        else:  # up to 0.32; after create_messages
            resolver = serving.AnthropicServingMessages.__new__(serving.AnthropicServingMessages)
            resolver._render_probe_prompt = probed
            disabled = request.thinking is not None and request.thinking.type == "disabled"
            effort = asyncio.run(resolver._probe_disabled_thinking_effort()) if disabled else "none"
        merge = serving.AnthropicServingMessages._detect_merge_inline_system(template)
        chat = serving.AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=merge, disabled_thinking_effort=effort)
        return self.chat(chat, given_format, defaults, **flags)

    def responses(self, body, given_format, defaults, exclude_tools=False, effort_map=None, architecture=None):
        """After OnlineRenderer.render_responses."""
        import vllm.entrypoints.openai.responses.protocol as protocol
        import vllm.entrypoints.openai.responses.utils as utils

        request = protocol.ResponsesRequest.model_validate(body)
        if request.previous_response_id is not None or request.truncation != "disabled":
            raise ValueError("not rendered")
        tools = utils.construct_tool_dicts(request.tools, request.tool_choice, exclude_tools_when_tool_choice_none=exclude_tools)
        request.messages = utils.construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        request.chat_template = None
        return self.chat(request, given_format, defaults, architecture, tools=tools, effort_map=effort_map)

    def text(self, template, given_format, defaults, body, messages=False, responses=False, encoder=None, **flags):
        """After OnlineRenderer.render_chat and preprocess_chat, and HfRenderer.render_messages."""
        self.tokenizer.chat_template, self.encoder = template, encoder
        if messages:
            return self.messages(template, given_format, defaults, body, flags)
        if responses:
            return self.responses(body, given_format, defaults, **flags)
        request = self.request.model_validate(body)
        if request.truncate_prompt_tokens is not None or (request.kv_transfer_params or {}).get("prompt_token_ids"):
            raise ValueError("not rendered")
        return self.chat(request, given_format, defaults, **flags)

    def chat(self, request, given_format, defaults, architecture=None, exclude_tools=False, effort_map=None, tools=False):
        if request.chat_template is not None or (request.chat_template_kwargs or {}).get("chat_template") is not None:
            raise ValueError("a template in the request")
        if tools is False:
            shown = request.tools is not None and not (exclude_tools and request.tool_choice == "none")
            tools = [tool.model_dump() for tool in request.tools] if shown else None
        self.placeholder = self.placeholder_of(architecture) if architecture else None
        if self.tokenizer.chat_template != self.detected:  # else vLLM knows the format, as a server with one template does
            self.hf._CONTENT_FORMATS.clear()
            self.detected = self.tokenizer.chat_template
        if self.encoder:
            params = request.build_chat_params(None, "auto", *[effort_map] * bool(effort_map)).with_defaults(self.merge(defaults, {"tools": tools, "tokenize": False}))
            prompt = self.encode_chat(request, params)
            return (prompt, self.encode(request, prompt)) if isinstance(prompt, str) else (None, prompt)
        params = request.build_chat_params(None, given_format, *[effort_map] * bool(effort_map)).with_defaults(self.merge(defaults, {"tools": tools, "tokenize": False}))
        content_format = self.hf.resolve_chat_template_content_format(
            chat_template=params.chat_template, tools=params.chat_template_kwargs.get("tools"),
            given_format=params.chat_template_content_format, tokenizer=self.tokenizer, model_config=self.config)
        conversation, media, _ = self.hf.parse_chat_messages(request.messages, self.config, content_format=content_format)
        if media and not architecture:
            raise ValueError("media")
        rendered = self.hf.safe_apply_chat_template(
            self.config, self.tokenizer, conversation, **params.get_apply_chat_template_kwargs())
        if not isinstance(rendered, str):
            return None, rendered
        return rendered, self.tokenizer.encode(rendered, add_special_tokens=request.build_tok_params(self.config).add_special_tokens)

    def encode(self, request, prompt):
        return self.tokenizer.encode(prompt, add_special_tokens=request.build_tok_params(self.config).add_special_tokens)

    def render(self, template, given_format, defaults, body):
        """After ServingRender.render_chat_request and render_completion_request."""
        def generate(ids):
            return self.generate.GenerateRequest(token_ids=ids, sampling_params={}, model=body["model"]).model_dump(mode="json")

        if "messages" in body:
            return generate(self.text(template, given_format, defaults, body)[1])
        return [generate(ids) for ids in self.completions(body)]

    def completions(self, body):
        """After OnlineRenderer.render_completion and preprocess_cmpl, and BaseRenderer.tokenize_prompt."""
        import vllm.renderers.inputs.preprocess as preprocess

        preprocess.TextPrompt = preprocess.TokensPrompt = dict  # what these TypedDicts make
        request = self.completion.CompletionRequest.model_validate(body)
        if request.suffix is not None or request.prompt_embeds is not None:
            raise ValueError("not rendered")
        params, prompts = request.build_tok_params(self.config), []
        if request.prompt is None:
            raise ValueError("no prompt")
        for given in preprocess.prompt_to_seq(request.prompt):
            prompt = preprocess.parse_dec_only_prompt(given)
            if "prompt_token_ids" not in prompt:
                prompt = params.apply_pre_tokenization(None, prompt)
                prompt["prompt_token_ids"] = self.tokenizer.encode(prompt["prompt"], **params.get_encode_kwargs())
            prompts.append(params.apply_post_tokenization(None, prompt)["prompt_token_ids"])
        return prompts

    def tokenize(self, template, given_format, defaults, body):
        """After ServingTokenization.create_tokenize."""
        self.tokenizer.chat_template = template
        request = self.tokenize_request.validate_python(body)
        if isinstance(request, self.tokenize_protocol.TokenizeChatRequest):
            ids = self.chat(request, given_format, defaults)[1]
        else:
            ids = self.encode(request, request.prompt)
        return self.tokenize_protocol.TokenizeResponse(tokens=ids, count=len(ids), max_model_len=self.config.max_model_len).model_dump()


    def cache(self, api, body):
        """Whether the parameters that vLLM makes of a request have it skip its cache, as SamplingParams decides."""
        request = (self.request if api == "chat/completions" else self.completion.CompletionRequest).model_validate(body)
        sys.modules[type(request).__module__].SamplingParams = types.SimpleNamespace(from_optional=lambda **given: given)
        if request.use_beam_search:  # BeamSearchParams have no prompt_logprobs
            return {"writes_only": False}
        return {"writes_only": request.to_sampling_params(1, {})["prompt_logprobs"] is not None}


class SGLang:
    def __init__(self, sources, tokenizer):
        stand_in("sglang", sources)
        import sglang.srt.entrypoints.openai.protocol as protocol

        for name in ("chat_encoding", "encoding_dsv32", "encoding_dsv4", "encoding_dsv41"):
            try:  # before the modules that ask their package for these, which would make stubs
                importlib.import_module("sglang.srt.entrypoints.openai." + name)
            except ModuleNotFoundError:  # this version has no such encoder
                pass
        import sglang.srt.entrypoints.openai.serving_chat as serving_chat
        import sglang.srt.parser.jinja_template_utils as utils
        import sglang.srt.parser.template_detection as detection

        self.detection = detection
        serving_chat.envs = types.SimpleNamespace(
            SGLANG_DEFAULT_THINKING=types.SimpleNamespace(get=lambda: False),
            SGLANG_DSV4_REASONING_EFFORT=types.SimpleNamespace(get=lambda: None))
        serving_chat.OpenAIServingChat._patch_reasoning_skip_special_tokens = lambda self, request: None
        serving_chat.OpenAIServingChat._get_reasoning_from_request = lambda self, request: False
        serving_chat.get_json_schema_constraint = lambda *args, **kwargs: None
        # Since 0.5.23: grammars of a response_template, which no model here has.
        serving_chat.OpenAIServingChat._takes_turn_grammar = lambda self, request, **flags: False
        serving_chat.OpenAIServingChat._requires_response_template_detokenization = lambda self, request: False
        serving_chat.chat_encoding.spec_renders_prompt_ids = lambda spec: False
        self.request, self.utils, self.tokenizer, self.protocol = protocol.ChatCompletionRequest, utils, tokenizer, protocol
        serving = serving_chat.OpenAIServingChat.__new__(serving_chat.OpenAIServingChat)
        serving.tokenizer_manager = types.SimpleNamespace(tokenizer=tokenizer, served_model_name="m")
        serving.template_manager = types.SimpleNamespace(chat_template_name=None, reasoning_config=None)
        serving.default_chat_template_kwargs = serving.reasoning_parser = serving.tool_call_parser = serving.chat_encoding_spec = None
        serving.is_gpt_oss = serving.is_gemma4 = serving._prompt_text_round_trip_is_lossy = False
        serving._inkling_default_reasoning_effort = 0.9
        serving._tokenizer_auto_adds_specials = len(tokenizer.encode("")) > 0
        serving._reasoning_detector = None
        # What later versions ask besides.
        serving.is_minimax_m3, serving._encoding_adapter, serving.template_manager.python_chat_template = False, None, None
        if hasattr(serving_chat, "parallel_prompt_encode"):
            import sglang.srt.entrypoints.openai.parallel_prompt_encode as encode

            encode.envs = types.SimpleNamespace(
                SGLANG_PARALLEL_PROMPT_ENCODE=types.SimpleNamespace(get=lambda: True),
                SGLANG_PARALLEL_PROMPT_ENCODE_MIN_CHARS=types.SimpleNamespace(get=lambda: 256))
        serving._chat_template_cache = collections.OrderedDict()
        self.serving, self.efforts = serving, {}

    def cache(self, api, body):
        """Where log probabilities begin in what SGLang makes of a request: at 0 it matches no prefix."""
        import sglang.srt.entrypoints.openai.serving_completions as serving

        serving.GenerateReqInput = lambda **given: types.SimpleNamespace(**given)
        server = serving.OpenAIServingCompletion.__new__(serving.OpenAIServingCompletion)
        server.template_manager = types.SimpleNamespace(completion_template_name=None)
        server._build_sampling_params = lambda request: {}
        made, _ = server._convert_to_internal_request(self.protocol.CompletionRequest.model_validate(body))
        return {"writes_only": made.return_logprob and made.logprob_start_len == 0}

    def use(self, tokenizer):
        """Takes another tokenizer."""
        self.tokenizer = self.serving.tokenizer_manager.tokenizer = tokenizer
        self.serving._tokenizer_auto_adds_specials = len(tokenizer.encode("")) > 0
        self.serving._chat_template_cache.clear()

    def efforts_of(self, folder):
        import sglang.srt.entrypoints.openai.chat_encoding as chat_encoding

        if folder not in self.efforts:
            self.efforts[folder] = chat_encoding.resolve_dsv4_reasoning_effort_profile(model_path=folder)
        return self.efforts[folder]

    def replace_template(self, config, template):
        """TemplateManager.load_chat_template, for code that takes the place of a checkpoint's template."""
        self.tokenizer.__dict__.pop("apply_chat_template", None)
        if template is None:
            return None
        import sglang.srt.parser.python_chat_template as python_chat_template

        replacement = python_chat_template.resolve_python_chat_template(config, template)
        if replacement:
            python_chat_template.install_python_chat_template(self.tokenizer, replacement)
        return replacement

    def detect(self, template):
        return self.utils.detect_jinja_template_content_format(template)

    @functools.cache  # as the server, which has one template; it takes longer than a request
    def about(self, template):
        """What SGLang finds out about a template when it starts."""
        source = template or ""
        return types.SimpleNamespace(
            content_format=self.detect(source), may_reorder_tool_results=self.utils.jinja_template_may_reorder_tool_results(source),
            supports_inline_system=self.detection.detect_inline_system_support(template),
            reasoning_config=self.detection.detect_reasoning_pattern(template)[1],
            # Since 0.5.23.
            reads_reasoning_content=getattr(self.utils, "jinja_template_reads_reasoning_content", lambda template: False)(template))

    def messages(self, body):
        """AnthropicServing._convert_to_chat_completion_request."""
        import sglang.srt.entrypoints.anthropic.protocol as protocol
        import sglang.srt.entrypoints.anthropic.serving as serving

        return serving.AnthropicServing(self.serving)._convert_to_chat_completion_request(protocol.AnthropicMessagesRequest.model_validate(body))

    def responses(self, body):
        """OpenAIServingResponses._make_request."""
        import asyncio

        import sglang.srt.entrypoints.openai.serving_responses as serving_responses

        request = self.protocol.ResponsesRequest.model_validate(body)
        # As create_responses does; only the model type beam takes such a tool.
        if request.previous_response_id is not None or any(tool.type == "shell" for tool in request.tools):
            raise ValueError("not rendered")
        serving = serving_responses.OpenAIServingResponses.__new__(serving_responses.OpenAIServingResponses)
        serving.__dict__.update(self.serving.__dict__)
        serving.tokenizer_manager.model_config = types.SimpleNamespace(is_multimodal=False)
        ids = list(asyncio.run(serving._make_request(request, None, self.tokenizer))[2][0])
        return "" if serving.chat_encoding_spec == "inkling" else None, ids

    @staticmethod
    def before_media(ids):
        """Inkling's ids before the mark of the first image or sound, which is followed by a placeholder."""
        return list(ids[:next((i for i, token in enumerate(ids) if token < 0), len(ids) + 1) - 1])

    def text(self, template, given_format, defaults, body, architecture=None, messages=False, responses=False, reasoning_parser=None, encoder=None, gpt_oss=False):
        """After OpenAIServingChat._convert_to_internal_request and, with architecture, TokenizerManager._tokenize_texts."""
        self.tokenizer.chat_template = template
        manager = self.serving.template_manager
        found = self.about(template)
        manager.jinja_template_content_format = found.content_format
        manager.jinja_template_may_reorder_tool_results = found.may_reorder_tool_results
        self.serving.default_chat_template_kwargs = defaults or {}
        self.serving.supports_inline_system = found.supports_inline_system
        self.serving.chat_encoding_spec = None
        if encoder:
            config = types.SimpleNamespace(architectures=[encoder[0]], model_type=encoder[1])
            self.serving.tokenizer_manager.model_config = types.SimpleNamespace(is_multimodal=False, hf_config=config)
            self.serving.chat_encoding_spec = self.serving._resolve_chat_encoding_spec()
            self.serving.is_minimax_m3 = encoder[1] == "minimax_m3_vl"
            manager.python_chat_template = self.replace_template(config, template)
            assert self.serving.chat_encoding_spec or manager.python_chat_template or self.serving.is_minimax_m3
            if manager.python_chat_template:
                manager.jinja_template_content_format = manager.python_chat_template.content_format
                manager.jinja_template_may_reorder_tool_results = manager.python_chat_template.may_reorder_tool_results
            if self.serving.chat_encoding_spec == "dsv4" and len(encoder) > 2:  # with a checkpoint's folder
                self.serving._dsv4_reasoning_effort_profile = self.efforts_of(encoder[2])
            if hasattr(self.serving, "_resolve_inline_system_support"):
                self.serving.supports_inline_system = self.serving._resolve_inline_system_support()
        self.serving._template_reads_reasoning_content = found.reads_reasoning_content
        self.serving.reasoning_parser, self.serving.is_gpt_oss = reasoning_parser, gpt_oss
        manager.reasoning_config = found.reasoning_config if reasoning_parser and template else None
        if responses:
            return self.responses(body)
        request = self.messages(body) if messages else self.request.model_validate(body)
        if (request.chat_template_kwargs or {}).get("chat_template") is not None or request.input_ids is not None:
            raise ValueError("not rendered")
        effort = request.chat_template_kwargs.pop("reasoning_effort", None) if request.chat_template_kwargs else None
        if effort is not None:
            request.reasoning_effort = effort
        result = self.serving._process_messages(request, bool(architecture))
        if self.serving.chat_encoding_spec == "inkling":
            return "", self.before_media(result.prompt_ids)
        if not architecture:
            return None, list(result.prompt_ids)
        kind, prompt = self.serving._engine_prompt(result, True)
        assert kind == "text"
        return prompt, self.tokenizer([prompt])["input_ids"][0]

    def completions(self, body):
        """After OpenAIServingCompletion._convert_to_internal_request and TokenizerManager._tokenize_texts."""
        import sglang.srt.entrypoints.openai.serving_completions as serving_completions

        serving_completions.GenerateReqInput = lambda **fields: types.SimpleNamespace(**fields)
        serving = serving_completions.OpenAIServingCompletion.__new__(serving_completions.OpenAIServingCompletion)
        serving.template_manager = types.SimpleNamespace(completion_template_name=None)
        serving.tokenizer_manager = self.serving.tokenizer_manager
        serving._build_sampling_params = lambda request: {}
        serving._resolve_lora_path = lambda model, path: None
        request = self.protocol.CompletionRequest.model_validate(body)
        error = serving._validate_request(request)
        if error:
            raise ValueError(error)
        asked, _ = serving._convert_to_internal_request(request)
        if hasattr(asked, "text"):
            return self.tokenizer([asked.text] if isinstance(asked.text, str) else asked.text)["input_ids"]
        return [asked.input_ids] if isinstance(asked.input_ids[0], int) else asked.input_ids

    def tokenize(self, template, given_format, defaults, body):
        """OpenAIServingTokenize.handle_request, with the body as FastAPI reads it."""
        import asyncio

        import sglang.srt.entrypoints.openai.serving_tokenize as serving_tokenize

        manager = self.serving.template_manager
        self.tokenizer.chat_template = template
        manager.jinja_template_content_format = self.detect(template or "")
        manager.jinja_template_may_reorder_tool_results = self.utils.jinja_template_may_reorder_tool_results(template or "")
        self.serving.default_chat_template_kwargs = defaults or {}
        serving = serving_tokenize.OpenAIServingTokenize.__new__(serving_tokenize.OpenAIServingTokenize)
        serving.tokenizer_manager, serving.chat_serving = self.serving.tokenizer_manager, self.serving
        self.serving.tokenizer_manager.model_config = types.SimpleNamespace(is_multimodal=False, context_len=1 << 20)
        request = self.protocol.TokenizeRequest.model_validate(body)
        if getattr(request, "stream", None):
            raise ValueError("does not support streaming requests")
        answer = asyncio.run(serving._handle_non_streaming_request(request, request, None))
        if not isinstance(answer, self.protocol.TokenizeResponse):
            raise ValueError(repr(answer))
        return answer.model_dump()


class TRTLLM:
    """What openai_chat of TensorRT-LLM 1.3's serve/openai_server does, read and told again."""

    def __init__(self, sources, tokenizer):
        import typing

        import typing_extensions
        from openai.types import chat
        from pydantic import BaseModel, ConfigDict

        self.tokenizer = tokenizer
        config, required, typed = ConfigDict(extra="allow"), typing_extensions.Required, typing_extensions.TypedDict

        def open_dict(name, fields):
            made = typed(name, fields, total=False)
            made.__pydantic_config__ = config
            return made

        # serve/openai_protocol: OpenAI's own types first, then anything with a role.
        part = typing.Union[chat.ChatCompletionContentPartParam, open_dict("Part", {"type": required[str]})]
        content = typing.Union[str, list[part], None]
        with_tools = open_dict("WithTools", {
            "role": required[typing.Literal["system"]], "tools": required[list[dict]], "content": content, "name": str})
        any_role = open_dict("AnyRole", {"role": required[str], "content": content, "name": str})

        class Strict(BaseModel):
            model_config = ConfigDict(extra="forbid")

        class Reasoning(chat.ChatCompletionAssistantMessageParam):
            reasoning: str | None
            reasoning_content: str | None

        class FunctionDefinition(Strict):
            name: str
            description: str | None = None
            parameters: dict | None = None
            strict: bool | None = None

        class Tool(Strict):
            type: typing.Literal["function"] = "function"
            function: FunctionDefinition

        class Request(Strict):
            messages: list[typing.Union[with_tools, chat.ChatCompletionMessageParam, any_role, Reasoning]]
            tools: list[Tool] | None = None
            add_generation_prompt: bool = True
            add_special_tokens: bool = False
            documents: list[dict[str, str]] | None = None
            chat_template_kwargs: dict | None = None

        class OpenFunction(BaseModel):
            model_config = config
            name: str | None = None
            arguments: str | dict | None = None

        class OpenCall(BaseModel):
            model_config = config
            id: str | None = None
            type: str | None = None
            function: OpenFunction

        self.request, self.call = Request, OpenCall

    # Fields of a request that do not reach the prompt. Fields that are neither these nor the model's are refused.
    OTHERS = ("model", "max_tokens", "stream", "temperature", "tool_choice", "reasoning_effort", "user", "seed", "cache_salt")

    def text(self, template, given_format, defaults, body):
        from pydantic import ValidationError

        if defaults:
            raise ValueError("there is no flag for defaults")
        request = self.request.model_validate({k: v for k, v in body.items() if k not in self.OTHERS})
        try:
            conversation = [self.message(message) for message in request.messages]
        except ValidationError:
            conversation = [self.message(message) for message in body["messages"]]
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        self.tokenizer.chat_template = template
        text = self.tokenizer.apply_chat_template(
            conversation=conversation, tokenize=False, return_dict=False, add_generation_prompt=request.add_generation_prompt,
            tools=tools, documents=request.documents, chat_template=self.tokenizer.get_chat_template(None, tools=tools),
            **(request.chat_template_kwargs or {}))
        return text, self.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)

    def message(self, given):
        """serve/chat_utils, parse_chat_message_content."""
        content = given.get("content")
        if content is None or isinstance(content, str):
            content = [content or ""]
        texts = []
        for part in content:
            if not isinstance(part, str):
                if part["type"] != "text":
                    raise ValueError("not text")
                part = part.get("text")
            if part is not None and not isinstance(part, str):
                raise ValueError("a text that is none")
            if part:
                texts.append(part)
        message = {"role": given["role"], "content": "\n".join(texts), "media": []}
        if given["role"] == "assistant":
            reasoning = given.get("reasoning") if given.get("reasoning") is not None else given.get("reasoning_content")
            if reasoning is not None:
                message["reasoning_content"] = reasoning
            calls = given.get("tool_calls")
            if isinstance(calls, list):
                calls = [self.call.model_validate(call, strict=False).model_dump(exclude_unset=True) for call in calls]
            if calls is not None:
                message["tool_calls"] = [self.with_arguments(call) for call in calls]
        elif given["role"] == "tool" and "tool_call_id" in given:
            message["tool_call_id"] = given["tool_call_id"]
        elif given["role"] == "system" and given.get("tools") is not None:
            message["tools"] = given["tools"]
        return message

    def with_arguments(self, call):
        call = {**call, "function": {**call["function"]}}
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError:
                return call
        if arguments is None:
            arguments = {} if call["function"].get("arguments") is None else None
        if not isinstance(arguments, dict):
            raise ValueError("arguments are no object")
        call["function"]["arguments"] = arguments
        return call


def main(engine, sources):
    from transformers import AutoTokenizer

    logging.disable(logging.CRITICAL)  # what goes wrong is in the answers
    new = {"vllm": VLLM, "sglang": SGLang, "trtllm": TRTLLM}[engine]
    for line in sys.stdin:
        asked = json.loads(line)
        if "folder" in asked:  # a new engine each time, because requests leave their marks on one
            tokenizer = AutoTokenizer.from_pretrained(asked["folder"])
            engine = new(sources, tokenizer)
            answer = {}
        elif "detect" in asked:
            answer = {"format": engine.detect(asked["detect"])}
        elif "cache" in asked:
            try:
                answer = engine.cache(asked["cache"], asked["body"])
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        elif "completions" in asked:
            try:
                answer = {"prompts": [list(ids) for ids in engine.completions(asked["completions"])]}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        elif "endpoint" in asked:
            try:
                answer = getattr(engine, asked["endpoint"])(asked["template"], "auto", asked.get("defaults"), asked["body"])
            except Exception as error:
                answer = {"error": {"message": f"{type(error).__name__}: {error}"[:300]}}
        else:
            try:
                more = {name: asked[name] for name in ("architecture", "encoder", "exclude_tools", "effort_map", "messages", "responses", "reasoning_parser", "gpt_oss") if name in asked}
                text, ids = engine.text(asked.get("template"), asked.get("format", "auto"), asked.get("defaults"), asked["body"], **more)
                answer = {"text": text if text is not None else tokenizer.decode(ids), "ids": list(ids)}
            except Exception as error:  # the engine answers it with an error, or the template raised one
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
