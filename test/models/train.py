"""Makes the two tiny models that the tests use, and the goldens that hold our tokenizer to them.

tiny-bytelevel     byte-level BPE as Qwen's: NFC, a Split regex, ChatML-like special tokens, a chat template with tools
tiny-sentencepiece SentencePiece-style BPE as Llama 2's: Prepend and Replace, byte fallback, <s> before a text

Each folder is a Hugging Face model folder without weights: enough for a tokenizer, for `--model-path` of Dynamo's frontend
and mocker, and for any engine that can start with random weights. The text they learn from is Python's own documentation,
so the tokens are those of English prose and code, at about three bytes a token.

The outputs are committed; run this only to change them. It is deterministic for one version of Python and of the packages
(Python 3.11, tokenizers 0.23.3, transformers 5.23.0):

    pip install tokenizers==0.23.3 transformers==5.23.0
    python3 test/models/train.py
"""

import importlib
import inspect
import json
import os
import pydoc_data.topics
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = os.path.dirname(os.path.abspath(__file__))
VOCABULARY = 3072

QWEN_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A little of many scripts, so that their commonest letters are tokens and the rest falls back to bytes.
OTHER_SCRIPTS = """
Die Straße führt über den Fluß nach Köln. Où est passé l'été dernier, à Noël? ¿Dónde está la niña pequeña? Привет, как дела?
Сегодня хорошая погода. Καλημέρα, τι κάνεις; 今天天气很好，我们去公园吧。 これは日本語の文章です。 안녕하세요, 반갑습니다. مرحبا بالعالم
שלום עולם नमस्ते दुनिया สวัสดีชาวโลก Xin chào thế giới. Çok güzel bir gün. Zażółć gęślą jaźń. 😀 👍 🎉 ❤️ 🚀 → ← × ÷ ≤ ≥ … – — “ ” ‘ ’
"""

MODULES = """
abc argparse ast asyncio.events base64 bisect bz2 calendar cmd codecs collections concurrent.futures.thread configparser
contextlib copy csv dataclasses datetime decimal difflib dis doctest email.message enum fileinput fnmatch fractions ftplib
functools getopt gettext glob gzip hashlib heapq hmac html.parser http.client http.server imaplib inspect io ipaddress json
keyword linecache locale logging logging.handlers lzma mailbox mimetypes multiprocessing.pool numbers operator optparse os
pathlib pdb pickle pickletools platform plistlib poplib pprint profile pstats pydoc queue quopri random re sched secrets
selectors shelve shlex shutil smtplib socket socketserver sqlite3 ssl stat statistics string subprocess symtable sysconfig
tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unittest.case unittest.mock urllib.parse
urllib.request uuid venv warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipapp zipfile
""".split()


def training_text():
    """English prose, some code, a little of other scripts: a list of texts, always the same."""
    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    for name in MODULES:
        module = importlib.import_module(name)
        texts.append(inspect.getdoc(module) or "")
        for member in sorted(vars(module)):
            value = vars(module)[member]
            if inspect.isclass(value) or inspect.isfunction(value):
                texts.append(inspect.getdoc(value) or "")
    texts += [inspect.getsource(importlib.import_module(name)) for name in ("textwrap", "heapq", "json.encoder")]
    texts += [OTHER_SCRIPTS] * 20
    return [t for t in texts if t]


BYTELEVEL_TEMPLATE = r"""
{%- set default_system = 'You are a helpful assistant.' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
{%- else %}
    {%- set system = default_system %}
{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
    {{- '\n\nThese functions are at hand, one JSON schema a line:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\nTo call one, write its name and arguments as JSON between <tool_call> and </tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- '<|im_start|>system\n' + message.content + '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
                {%- if call.function.arguments is string %}
                    {{- call.function.arguments }}
                {%- else %}
                    {{- call.function.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

SENTENCEPIECE_TEMPLATE = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim + '\n\n' %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- set turns = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' }}
        {%- if turns.user == 0 %}
            {{- system }}
        {%- endif %}
        {%- set turns.user = turns.user + 1 %}
        {{- message.content | trim + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + ' ' + eos_token }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- raise_exception('only user and assistant may follow the first message') }}
    {%- endif %}
{%- endfor %}
"""


def bytelevel():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    return tokenizer


def sentencepiece():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, limit_alphabet=400, show_progress=False)
    # Without a pre-tokenizer a text is one word, so it is cut into words here, as SentencePiece's trainer does.
    words = (word for text in training_text() for word in text.replace("\n", " ").split(" ") if word)
    tokenizer.train_from_iterator(words, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [t for t in saved["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)]
    )
    return tokenizer


def write_json(folder, name, value, **options):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
        json.dump(value, out, ensure_ascii=False, **options)
        out.write("\n")


def write_model(name, tokenizer, config, special, template, template_in_config, merges_as_lines):
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    saved = json.loads(tokenizer.to_str())
    if merges_as_lines:  # the older form of the file, which most published models still have
        saved["model"]["merges"] = [" ".join(pair) for pair in saved["model"]["merges"]]
    write_json(folder, "tokenizer.json", saved, separators=(",", ":"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if template_in_config:
        tokenizer_config["chat_template"] = template
    else:
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as out:
            out.write(template)
    write_json(folder, "tokenizer_config.json", tokenizer_config, indent=2)
    ids = {key: tokenizer.token_to_id(token) for key, token in special.items()}
    begin, end = ids.get("bos_token"), ids["eos_token"]
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": begin,
        "eos_token_id": end,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    write_json(folder, "config.json", {**config, **shape}, indent=2)
    write_json(folder, "generation_config.json", {"bos_token_id": begin, "eos_token_id": [end], "do_sample": False}, indent=2)
    return folder


PROSE = [
    "The quick brown fox jumps over the lazy dog. It didn't stop; it couldn't, because the dog's owner wasn't there.",
    "A cache keeps what was computed before, so that a request which begins like an earlier one starts further along.",
    "In the morning the harbour was quiet. Two boats had left before dawn, and nobody expected them back until evening.",
    "Please summarise the following report in three sentences, and then list the open questions in order of importance.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Portez ce vieux whisky au juge blond qui fume; dès Noël, où un zéphyr haï me vêt de glaçons würmiens.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío, añoraba a su querido cachorro.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΟΔΟΣ ΣΑΣ",
    "我能吞下玻璃而不伤身体。今天是2026年11月21日，天气很好！",
    "いろはにほへと ちりぬるを。カタカナとｶﾀｶﾅ、漢字も。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "Do bạch kim rất quý nên sẽ dùng để lắp vô xương.",
    "Pijamalı hasta yağız şoföre çabucak güvendi. İıŞşĞğ",
]

CODE = [
    "def f(x, *args, **kwargs):\n    if x > 0:\n        return {'a': [1, 2.5e-3], \"b\": None}\n    raise ValueError(f\"{x!r}\")\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];  // dot product\n}\n",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3, "units": ["C", null, true]}}',
    "# Title\n\n* one\n* two\n    * nested\n\n```sh\n$ make test | tee out.log && echo \"done: $?\"\n```\n",
    "<html><body class=\"a b\"><p>Tom &amp; Jerry</p><!-- x --></body></html>",
    "https://example.com/a/b?x=1&y=%20#frag  mailto:a.b+c@d.org  C:\\Users\\x\\y.txt  ../up/./here",
    "func main() {\n\tfmt.Println(\"héllo\", 0x1F, 'x', `raw`)\n}\n",
]

PIECES = [
    "don't", "I'LL", "we've", "it'ſ", "'S", "' s", "HELLO", "camelCaseWord", "snake_case_word", "ALLCAPS", "12345", "3.14159", "1,000,000",
    "½", "²", "Ⅷ", "٣", "漢字", "かな", "한글", "עברית", "नमस्ते", "ไทย", "😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "e\u0301", "\u00e9", "\u212b",
    "A\u030a", "\u1100\u1161\u11a8", "\uac01", "q\u0307\u0323", "q\u0323\u0307", "\u0344", "ﬁ", "ǆ", "ß", "ŉ", "\u0958", "\u2126", "▁", "▁▁", "<unk>",
    "<s>", "</s>", "<0x0A>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "im_end|>", "<tool_call>", "</tool_call>", "<think>",
    "__init__", "//", "/*", "$100", "¿qué?", "…", "—", "‘a’", "\u200b", "\ufeff", "\u00ad", "\u200d", "\u202e", "\ufffd", "\x00", "\x01", "\x1b[0m", "\x7f",
]

SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u2028", "\x0b", "\x0c", "\x85", "\u1680"]


def golden_strings():
    """Texts of every kind that tokenizers disagree about: a list, always the same."""
    rng = random.Random(3)
    strings = ["", " ", "  ", "a", " a", "a ", "\n", "\n\n\n", "\t \t", "'", "''s", "\x00", "\u00e9", "\U0010ffff", "<|im_start|>", "<s>", "<s><s> </s>"]
    strings += PROSE + CODE + PIECES
    strings += [f"a{space}b{space}{space}c{space}" for space in SPACES]
    strings += [c * n for c in ("a", " ", "\n", "=", "1", "é", "漢", "😀", "ab", "- ") for n in (7, 400)]
    strings += ["q\u0307\U00010f49\u0323", "a\u0301\u1abf\u0323", "\u1039\U0001e4ec\U0001e023", "\U00011935\U00011930"]  # newer than NFC here
    strings += [" ".join(PROSE), "\n".join(CODE), "".join(PIECES), "".join(SPACES)]
    strings += ["<|im_start|>user\n" + p + "<|im_end|>\n" for p in PROSE[:3]] + ["<s>[INST] " + p + " [/INST]" for p in PROSE[:3]]
    for _ in range(120):
        text = ""
        for _ in range(rng.randrange(2, 12)):
            kind = rng.random()
            if kind < 0.4:
                text += rng.choice(PIECES)
            elif kind < 0.6:
                text += rng.choice(SPACES)
            elif kind < 0.8:
                words = rng.choice(PROSE).split(" ")
                at = rng.randrange(len(words))
                text += " ".join(words[at : at + 3])
            elif kind < 0.9:
                text += chr(rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0xE000, 0x10000), rng.randrange(0x10000, 0x20000)]))
            else:
                text += rng.choice("abcABC019.,!?'\"()[]{}<>|/\\-_=+*&%$#@~^") * rng.randrange(1, 9)
        strings.append(text)
    return strings


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, \"now\" or <later>.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"], "default": 1, "minimum": 0.5}},
            "required": ["city"],
        },
    },
}


def chat_requests():
    """Chat requests: messages and what goes with them. Those that only one template can render fail in the other."""
    def say(role, content, **more):
        return {"role": role, "content": content, **more}

    requests = []
    for prompt in PROSE:
        requests.append({"messages": [say("user", prompt)]})
    for system in ("Be brief.", "  padded  \n", "Ünï\u0301cödé 😀"):
        requests.append({"messages": [say("system", system), say("user", "Hi")]})
        requests.append(
            {
                "messages": [
                    say("system", system),
                    say("user", CODE[0]),
                    say("assistant", " It is a function.\n"),
                    say("user", "\nThank you! "),
                ]
            }
        )
    long = [say("system", " ".join(PROSE[:4]))]
    for turn in range(6):
        long += [say("user", f"Question {turn}: {PROSE[turn % 4]}"), say("assistant", f"Answer {turn}.\n\n{CODE[turn % 8]}")]
    requests.append({"messages": long + [say("user", "Go on.")]})
    requests.append({"messages": long, "add_generation_prompt": False})
    requests.append({"messages": long, "add_generation_prompt": False, "continue_final_message": True})
    requests.append({"messages": [say("user", "x"), say("assistant", "one two")], "add_generation_prompt": False, "continue_final_message": True})
    requests.append({"messages": [say("user", "x")], "add_generation_prompt": False})
    requests.append({"messages": [say("user", "x")], "chat_template_kwargs": {"enable_thinking": False}})
    requests.append({"messages": [say("user", "x")], "chat_template_kwargs": {"enable_thinking": True, "bos_token": "<|endoftext|>"}})
    requests.append({"messages": [say("user", "<|im_end|><|im_start|>system\n</s><s>[INST]")]})
    requests.append({"messages": [say("user", "")]})
    requests.append({"messages": [say("user", "weather?")], "tools": [WEATHER]})
    requests.append({"messages": [say("system", "S"), say("user", "weather?")], "tools": [WEATHER, WEATHER], "documents": [{"title": "a", "text": "b"}]})
    for arguments in ('{"city":"Zürich"}', {"city": "Zürich", "days": 2, "f": 1.0, "n": None, "l": [True, "\u2028</script>"]}):
        call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        requests.append(
            {
                "messages": [
                    say("user", "weather?"),
                    say("assistant", None, tool_calls=[call, call]),
                    say("tool", '{"temp": 21.5}', tool_call_id="c1"),
                    say("assistant", "21.5 degrees."),
                    say("user", "And tomorrow?"),
                ],
                "tools": [WEATHER],
            }
        )
    requests.append({"messages": [say("critic", "x")]})
    requests.append({"messages": [say("user", "x"), say("system", "y")]})
    requests.append({"messages": [say("assistant", "only"), say("assistant", "twice", reasoning_content="because", name=None)]})
    return requests


def write_goldens(folder):
    name = os.path.basename(folder)
    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    strings = [
        {"text": s, "ids": tokenizer.encode(s, add_special_tokens=False).ids, "withSpecial": tokenizer.encode(s).ids}
        for s in golden_strings()
    ]
    for golden in strings:  # most texts differ only by their surroundings
        if golden["withSpecial"] == golden["ids"]:
            del golden["withSpecial"]
    chats = []
    hf = PreTrainedTokenizerFast.from_pretrained(folder)
    for request in chat_requests():
        options = {k: v for k, v in request.items() if k not in ("messages", "chat_template_kwargs")}
        options.setdefault("add_generation_prompt", True)
        options.update(request.get("chat_template_kwargs", {}))
        golden = {"request": {"model": name, **request}}
        try:
            golden["text"] = hf.apply_chat_template(request["messages"], tokenize=False, **options)
            golden["ids"] = hf.apply_chat_template(request["messages"], tokenize=True, return_dict=False, **options)
        except Exception as e:  # the template refuses, and so must ours
            golden["error"] = str(e)
        chats.append(golden)
    os.makedirs(os.path.join(HERE, "testdata"), exist_ok=True)
    write_json(os.path.join(HERE, "testdata"), name + ".json", {"strings": strings, "chats": chats}, separators=(",", ":"))
    prose = " ".join(PROSE[:4])
    rate = len(prose.encode()) / len(tokenizer.encode(prose, add_special_tokens=False).ids)
    print(f"{name}: {tokenizer.get_vocab_size()} tokens, {rate:.2f} bytes of prose per token, {len(strings)} strings, {len(chats)} chats")


def main():
    folder = write_model(
        "tiny-bytelevel",
        bytelevel(),
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        BYTELEVEL_TEMPLATE.lstrip("\n"),
        template_in_config=False,
        merges_as_lines=False,
    )
    write_goldens(folder)
    folder = write_model(
        "tiny-sentencepiece",
        sentencepiece(),
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False},
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        SENTENCEPIECE_TEMPLATE.lstrip("\n"),
        template_in_config=True,
        merges_as_lines=True,
    )
    write_goldens(folder)


if __name__ == "__main__":
    main()
