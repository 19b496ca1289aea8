"""Makes small tokenizer folders of every class of Transformers, loads each as an engine loads a model's, and says which ids it gives.

    folders.py vllm|sglang SOURCES OUT TEXTS VARIANTS TYPES ONLY REAL...

SOURCES are those of engines.py. The folders are made below OUT; REAL are further ones, with real models' files. TEXTS is a file with a text's JSON on each
line. Prints a JSON line for each folder: {"folder": ..., "class": ..., "variant": ..., "loaded": the class that the engine took,
"error": ... or "special": the ids of each text as a completion, "plain": as it is in a chat, "chats": those of chats(), by the engine's
own code}. Only every VARIANTSth of the variants and every TYPESth of the model types is made, and of all these folders only those
whose class and variant, with a space between them, contain a match of the pattern ONLY.

The loading is the engine's own: vllm.tokenizers.registry.get_tokenizer with vllm.transformers_utils.config, and
sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer, over the Transformers of its environment.
"""

import ast
import glob
import importlib
import inspect
import json
import logging
import os
import re
import sys
import warnings

import engines

LOADERS = {
    "vllm": ["vllm.tokenizers.hf", "vllm.tokenizers.protocol", "vllm.tokenizers.registry", "vllm.transformers_utils.config",
             "vllm.transformers_utils.config_parser_base", "vllm.transformers_utils.repo_utils", "vllm.transformers_utils.utils", "vllm.utils.import_utils"],
    "sglang": ["sglang.srt.utils.hf_transformers.common", "sglang.srt.utils.hf_transformers.mistral_utils", "sglang.srt.utils.hf_transformers.tokenizer",
               "sglang.srt.utils.hf_transformers_patches", "sglang.srt.utils.patch_tokenizer"],
}


def loader(engine, sources):
    """The engine's get_tokenizer. What it asks of the rest of the engine is stood in for."""
    engines.REAL[engine] += LOADERS[engine]
    engines.stand_in(engine, sources)
    if engine == "vllm":
        import vllm.envs as envs

        envs.VLLM_USE_MODELSCOPE = envs.VLLM_USE_FASTOKENS = False
        import time

        import transformers
        import vllm.tokenizers.registry as registry
        import vllm.transformers_utils.config as config

        for model_type, config_class in dict.items(config._CONFIG_REGISTRY):  # some need PyTorch
            if isinstance(config_class, str):  # Transformers knows a class by its name
                config._CONFIG_REGISTRY[model_type] = type(config_class, (transformers.PreTrainedConfig,), {"model_type": model_type})
        time.sleep = lambda seconds: None  # vLLM tries again, after seconds, what fails for these folders each time
        return registry.get_tokenizer
    import sglang.srt.utils as utils
    import sglang.srt.utils.runai_utils as runai_utils

    utils.is_remote_url = runai_utils.is_runai_obj_uri = lambda name: False
    utils.get_bool_env_var = lambda *args, **kwargs: False
    utils.logger = logging.getLogger("sglang")
    utils.lru_cache_frozenset = lambda *args, **kwargs: lambda function: function
    import sglang.srt.utils.hf_transformers.tokenizer as tokenizer

    return tokenizer.get_tokenizer


# The files of small tokenizers.

WORDS = ["▁the", "▁Hi", "▁ok", "▁user", "Hello", "▁world", "hello", "▁x", "xy", "don", "'t", "'s", "▁1", "12", "34", "1234", "123", "\n\n", "\n\n\n", "▁▁", "▁▁▁", ".\n",
         ".\n\n", "\r\n", "é", "e\u0301", "É", "ß", "漢字", "こ", "한", "👍", "ﬁ", "▁A", "AB", "▁▁a", "a▁", "\t\t", "_x", "…"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<pad>"]


def byte_chars():
    """The characters that stand for bytes in byte-level vocabularies, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in plain else next(others)) for b in range(256)]


def added(id, content, **flags):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}


def with_words(vocab, words, known):
    """Adds words to a vocabulary, each by merging its characters from the left."""
    merges = []
    for word in words:
        if not all(c in known for c in word):
            continue
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[: end - 1], word[end - 1]])
    return merges


def tokenizer_file(model, specials, normalizer=None, pre=None, post=None, decoder=None):
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": specials, "normalizer": normalizer,
            "pre_tokenizer": pre, "post_processor": post, "decoder": decoder, "model": model}


def begins_with(token, id, ends=()):
    """A post-processor that puts a token before a text, and others behind it."""
    mark = lambda t: {"SpecialToken": {"id": t, "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [mark(token), {"Sequence": {"id": "A", "type_id": 0}}, *[mark(t) for t, _ in ends]],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in [(token, id), *ends]}}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")


def split_by(pattern, *before):
    return {"type": "Sequence", "pretokenizers": [*before, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                                                  {**BYTE_LEVEL, "use_regex": False}]}


def byte_level(pre=BYTE_LEVEL, normalizer=None, post=None, specials=(), **model):
    chars = byte_chars()
    vocab = {c: i for i, c in enumerate(chars)}
    words = ["".join(chars[b] for b in word.replace("▁", " ").encode()) for word in WORDS]
    merges = with_words(vocab, words, chars)
    first = len(vocab)
    tokens = [added(first + i, s) for i, s in enumerate(SPECIALS)] + [added(first + len(SPECIALS) + i, **s) for i, s in enumerate(specials)]
    ids = {t["content"]: t["id"] for t in tokens}
    if callable(post):
        post = post(ids)
    return tokenizer_file({"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
                           "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges, **model}, tokens, normalizer, pre, post,
                          {**BYTE_LEVEL, "add_prefix_space": True})


LLAMA_NORMALIZER = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def metaspace(scheme, split=False):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def sentencepiece(pre=None, normalizer=LLAMA_NORMALIZER, post=None, specials=(), **model):
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    chars = "▁\n\t\r" + "".join(chr(c) for c in range(33, 127)) + "éßÉ漢字こ한…\u0301"
    for c in chars:
        vocab.setdefault(c, len(vocab))
    merges = with_words(vocab, WORDS, chars)
    first = len(vocab)
    own = [s for s in SPECIALS if s not in vocab]
    tokens = [added(vocab[s], s) for s in ("<unk>", "<s>", "</s>")] + [added(first + i, s) for i, s in enumerate(own)]
    tokens += [added(first + len(own) + i, **s) for i, s in enumerate(specials)]
    if callable(post):
        post = post({t["content"]: t["id"] for t in tokens})
    return tokenizer_file({"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
                           "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": merges, **model}, tokens, normalizer, pre, post)


def unigram(pre=metaspace("always", True), normalizer=None, post=None):
    words = ["<s>", "<pad>", "</s>", "<unk>", *"▁\n\t" + "".join(chr(c) for c in range(33, 127)) + "éßÉ漢字こ한", *[w for w in WORDS if not w.isspace()], "<mask>"]
    vocab = [[w, 0.0 if i < 4 else -2.0 - len(words) / (i + 1) / (1 + len(w))] for i, w in enumerate(dict.fromkeys(words))]
    return tokenizer_file({"type": "Unigram", "unk_id": 3, "vocab": vocab, "byte_fallback": False}, [added(i, vocab[i][0]) for i in range(4)], normalizer, pre, post)


def wordpiece():
    vocab = {t: i for i, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "the", "hi", "##s", "##t",
                                          *(chr(c) for c in range(33, 127)), *("##" + chr(c) for c in range(97, 123))])}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab}
    return tokenizer_file(model, [added(i, t) for t, i in list(vocab.items())[:5]], {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                          "strip_accents": None, "lowercase": True}, {"type": "BertPreTokenizer"}, begins_with("[CLS]", 2, [("[SEP]", 3)]))


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GPT = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
FLAGS = [{"content": "<|tool|>"}, {"content": "<|wide|>", "lstrip": True, "rstrip": True}, {"content": "word", "single_word": True, "special": False},
         {"content": "Norm", "normalized": True, "special": False}, {"content": "<|img|>"}]
NFC = {"type": "NFC"}


def variants():
    """Name, tokenizer.json, tokenizer_config.json without its class, config.json (None: no such file), and further files of each variant."""
    begin = lambda token, *ends: lambda ids: begins_with(token, ids[token], [(e, ids[e]) for e in ends])
    # Byte-level vocabularies.
    yield "bytes", byte_level(), GPT, "exaone4", {}
    yield "bytes-gpt4", byte_level(split_by(GPT4)), GPT, "exaone4", {}
    yield "bytes-qwen-nfc-bos", byte_level(split_by(QWEN), NFC, begin("<s>")), {**NAMED, "add_prefix_space": False}, "llama", {}
    yield "bytes-prefix-space", byte_level({**BYTE_LEVEL, "add_prefix_space": True}), {**GPT, "add_prefix_space": True}, "exaone4", {}
    yield "bytes-add-bos-eos", byte_level(split_by(GPT4)), {**NAMED, "add_bos_token": True, "add_eos_token": True}, "deepseek_v3", {}
    yield "bytes-no-add-bos", byte_level(post=begin("<s>")), {**NAMED, "add_bos_token": False}, "exaone4", {}
    yield "bytes-no-config", byte_level(split_by(GPT4), NFC), {**GPT, "errors": "replace"}, None, {}
    yield "bytes-digits-lower", byte_level(split_by(GPT4, {"type": "Digits", "individual_digits": True}), {"type": "Sequence", "normalizers": [
        {"type": "NFKC"}, {"type": "Lowercase"}]}, begin("<s>", "</s>"), ignore_merges=True), {**NAMED, "do_lower_case": True}, "exaone4", {}
    yield "bytes-mapped", byte_level(split_by(GPT4)), {**GPT, "legacy": False}, "minimax_m2", {}
    yield "bytes-flags", byte_level(specials=FLAGS), {
        **GPT, "image_token": "<|img|>", "additional_special_tokens": ["<|tool|>", "<|new|>"], "added_tokens_decoder": {
            "DECODER": [{"content": "<|tool|>", "lstrip": True, "rstrip": True}, {"content": "<|wide|>"}, {"content": "word"}]}}, "exaone4", {}
    yield "bytes-extra", byte_level(specials=FLAGS[:1]), {
        **GPT, "extra_special_tokens": {"image_token": "<|img|>", "x_token": "<|x|>"}, "unk_token": {"__type": "AddedToken", "content": "<|unk|>", "lstrip": False,
        "normalized": True, "rstrip": False, "single_word": False}}, "exaone4", {}
    yield "bytes-older-files", byte_level(), {"bos_token": "<s>"}, "exaone4", {
        "special_tokens_map.json": {"eos_token": "</s>", "additional_special_tokens": ["<|tool|>"]}, "added_tokens.json": {"<|img|>": 999, "<|more|>": 998}}
    yield "bytes-decoder-new", byte_level(), {**GPT, "clean_up_tokenization_spaces": True, "model_max_length": 16, "added_tokens_decoder": {
        "DECODER": [{"content": "<|tool|>", "id": 900}, {"content": "<|more|>", "id": 899, "special": False, "normalized": True}, {"content": "<|im_end|>"}]}}, "exaone4", {}
    yield "bytes-token-dicts", {**byte_level(split_by(QWEN)), "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
                                "padding": {"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}}, {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True, "rstrip": False, "normalized": True, "single_word": False}, "eos_token": None, "pad_token": "",
        "additional_special_tokens": [{"content": "<|tool|>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "__type": "AddedToken"}, "Hello"],
        "tool_token": "<|new|>"}, "exaone4", {}
    # Vocabularies like SentencePiece's.
    yield "pieces-legacy", sentencepiece(post=begin("<s>")), {**NAMED, "legacy": True}, "llama", {}
    yield "pieces", sentencepiece(post=begin("<s>")), {**NAMED, "legacy": False, "add_bos_token": True}, "llama", {}
    yield "pieces-metaspace", sentencepiece(metaspace("first"), None, begin("<s>")), {**NAMED, "add_prefix_space": True}, None, {}
    yield "pieces-no-prefix", sentencepiece(metaspace("never"), None), {**NAMED, "add_prefix_space": False, "add_bos_token": False, "add_eos_token": True}, "llama", {}
    yield "pieces-gemma", sentencepiece({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}, SPACES, begin("<s>")), {
        **NAMED, "pad_token": "<pad>"}, "gemma3_text", {}
    yield "pieces-mapped", sentencepiece(post=begin("<s>", "</s>")), {**NAMED, "legacy": False, "add_bos_token": True}, "phi3", {}
    yield "pieces-always", sentencepiece(metaspace("always", True), NFC), {**NAMED, "legacy": False, "pad_token": "<pad>", "extra_special_tokens": ["<|new|>"]}, "mistral", {}
    yield "pieces-flags", sentencepiece(specials=FLAGS), {**NAMED, "additional_special_tokens": ["<|new|>"], "added_tokens_decoder": {
        "DECODER": [{"content": "<|tool|>", "rstrip": True}, {"content": "<s>", "lstrip": True}]}}, "llama", {}
    yield "pieces-from-slow", sentencepiece(post=begin("<s>")), {"legacy": None, "from_slow": True, "bos_token": "<s>", "use_default_system_prompt": False,
        "sp_model_kwargs": {}, "spaces_between_special_tokens": False}, "llama", {}
    yield "pieces-no-tokens", sentencepiece(metaspace("always"), {"type": "Strip", "strip_left": True, "strip_right": False}), {}, "llama", {}


def natives():
    """Folders with other vocabularies, for the classes that have these."""
    yield "unigram", unigram(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, "t5", {}
    yield "wordpiece", wordpiece(), {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}, "bert", {}


TEMPLATE = ("{% if messages | length == 1 %}{{ messages[0].content }}{% else %}{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "<|im_end|>\n{{ eos_token }}{% endfor %}{{ unk_token }}{{ pad_token }}{{ image_token }}{{ x_token }}{{ sep_token }}{% if add_generation_prompt %}"
            "<|tool|> <|im_start|>assistant\n{% endif %}{% endif %}")


def chats():
    def m(role, content):
        return {"role": role, "content": content}

    yield [m("system", "Be the first.\n"), m("user", " Hi 1234, don't!")]
    yield [m("user", "Hi"), m("assistant", "ok\n\nHello"), m("user", "漢字 é e\u0301  world")]


def write(folder, tokenizer, config, model, files, template=TEMPLATE):
    os.makedirs(folder)
    config = json.loads(json.dumps(config))  # the caller's is shared
    decoder = config.get("added_tokens_decoder")
    if decoder:
        ids = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
        config["added_tokens_decoder"] = {str(t.pop("id", None) or ids[t["content"]]): {k: v for k, v in added(0, **t).items() if k != "id"} for t in decoder["DECODER"]}
    for name, value in {"tokenizer.json": tokenizer, "tokenizer_config.json": config, "config.json": model, **files}.items():
        if value is not None:
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                json.dump(value, file, ensure_ascii=False)
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
        file.write(template)


def classes():
    """The name of every tokenizer class in a model's folder of the installed Transformers, whether it can be imported here or not."""
    import transformers

    names = set()
    for path in glob.glob(os.path.dirname(transformers.__file__) + "/models/*/tokenization_*.py"):
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Tokenizer", "TokenizerFast", "TokenizerLegacy")) and node.bases:
                names.add(node.name)
    return sorted(names)


def model_config(model_type, **more):
    return None if model_type is None else {"model_type": model_type, "architectures": ["XForCausalLM"], **more}


def model_types():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    of_vllm = [*getattr(sys.modules.get("vllm.tokenizers.registry"), "_MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS", ()),
               *getattr(sys.modules.get("vllm.transformers_utils.config"), "_CONFIG_REGISTRY", ())]
    return sorted({*CONFIG_MAPPING_NAMES, *TOKENIZER_MAPPING_NAMES, *of_vllm})


def folders(nth_variant, nth_type):
    """Class and variant of each folder, and what is in it."""
    both = list(variants())[::nth_variant]
    everything = [*both, *natives()]
    gpt4, nfc, pieces = byte_level(split_by(GPT4)), byte_level(split_by(GPT4), NFC), sentencepiece()
    for name in ["TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "LlamaTokenizerFast", "NoSuchTokenizer", *classes()]:
        for variant, tokenizer, config, model_type, files in everything:
            yield name, variant, (tokenizer, {"tokenizer_class": name, **config}, model_config(model_type), files)
        yield name, "in-model-config", (nfc, GPT, model_config("exaone4", tokenizer_class=name), {})
    for variant, tokenizer, config, model_type, files in both:
        yield "", variant, (tokenizer, config, model_config(model_type), files)
    for model_type in model_types()[::nth_type]:
        yield "GPT2Tokenizer", "type " + model_type, (gpt4, {"tokenizer_class": "GPT2Tokenizer", **GPT}, model_config(model_type), {})
        yield "LlamaTokenizer", "type " + model_type, (pieces, {"tokenizer_class": "LlamaTokenizer", **NAMED}, model_config(model_type), {})
        yield "", "type " + model_type, (gpt4, GPT, model_config(model_type), {})


# The model types of real models; their packages have no config.json.
TYPES = {"llama2": "llama", "llama3_1": "llama", "qwen3": "qwen3", "deepseek_v3": "deepseek_v3", "gemma3": "gemma3_text", "gptoss": "gpt_oss"}


def with_type(folder, out):
    """A copy of a real model's folder with the model's type, if that is known."""
    model_type = TYPES.get(os.path.basename(folder).rpartition("-")[0])
    if not model_type:
        return folder
    copied = f"{out}/{os.path.basename(folder)}"
    os.makedirs(copied)
    for name in os.listdir(folder):
        os.symlink(os.path.join(folder, name), os.path.join(copied, name))
    with open(copied + "/config.json", "w", encoding="utf-8") as file:
        json.dump(model_config(model_type), file)
    return copied


def prompt(engine, tokenizer, chat):
    """The ids of a chat; None if a real model's template refuses it."""
    try:
        return list(engine.text(tokenizer.chat_template, "auto", None, {"model": "m", "messages": chat})[1])
    except Exception:
        if tokenizer.chat_template == TEMPLATE:
            raise
        return None


def main(name, sources, out, texts, nth_variant, nth_type, only, *real):
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some classes print
    load, engine = loader(name, sources), None
    with open(texts, encoding="utf-8") as file:
        texts = [json.loads(line) for line in file]
    todo = [(cls, variant, None, parts) for cls, variant, parts in folders(int(nth_variant), int(nth_type)) if re.search(only, cls + " " + variant)]
    for i, (cls, variant, folder, parts) in enumerate(todo + [("", "real", with_type(folder, out), None) for folder in real]):
        if parts:
            folder = f"{out}/{i}"
            write(folder, *parts)
        answer = {"folder": folder, "class": cls, "variant": variant}
        try:
            tokenizer = load(folder)
            answer["loaded"] = type(tokenizer).__name__.removeprefix("Cached")
            answer["special"] = [list(ids) for ids in tokenizer(texts)["input_ids"]]
            answer["plain"] = [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
            engine = engine or {"vllm": engines.VLLM, "sglang": engines.SGLang}[name](sources, tokenizer)
            engine.use(tokenizer)
            answer["chats"] = [prompt(engine, tokenizer, chat) for chat in chats()]
        except BaseException as error:  # the engine does not start with such a folder, or tokenizers panics
            answer = {**answer, "error": f"{type(error).__name__}: {error}"[:300], "special": None, "plain": None, "chats": None}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
