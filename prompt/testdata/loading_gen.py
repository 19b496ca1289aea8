"""Writes loading.json: the ids that an engine's own tokenizer gives texts, for small folders of each class that package tokenizer reproduces.

    loading_gen.py VERSION ENGINE OUT

Run it in an environment with the Transformers that the engine's version requires (for SGLang with the engine's sources below SGLANG_SOURCES,
whose get_tokenizer loads the folder); it adds the version's ids to OUT. `test/tools/install.sh engines` and `versions` make the environments.
"""

import json
import logging
import os
import sys
import tempfile
import warnings

TEXTS = ["Hi ok<|user|> Hi ok", " Hi don't 1234.\n\nx", "é e\u0301 漢 <|new|><|img|>x", "<|wide|> y <|wide|>x<unk> <s>ok</s> Hi", "", "<|more|>xy\u2581<pad>"]


def added(id, content, **flags):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}


def merge(vocab, words):
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[: end - 1], word[end - 1]])
    return merges


def bytes_base():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    chars = [chr(b if b in plain else next(others)) for b in range(256)]
    vocab = {c: b for b, c in enumerate(chars)}
    spell = lambda word: "".join(chars[b] for b in word.encode())
    merges = merge(vocab, [spell(w) for w in ["Hi", " ok", " Hi", "don", "'t", "12", "1234", ".\n\n", "é", "漢", "xy", "\n\n"]])
    specials = ["<|endoftext|>", "<s>", "</s>", "<unk>", "<|user|>", "<|wide|>"]
    return {"added_tokens": [added(len(vocab) + i, s) for i, s in enumerate(specials)], "normalizer": None, "post_processor": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
                      "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}}


def pieces_base():
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *map(chr, range(33, 127)), "é", "\u0301"])}
    merges = merge(vocab, ["▁Hi", "▁ok", "▁user", "▁▁", "▁y", "don", "12", "1234", "ok", "xy"])
    specials = ["<|user|>", "<|wide|>"]
    return {"added_tokens": [added(i, s) for i, s in enumerate(["<unk>", "<s>", "</s>"])] + [added(len(vocab) + i, s) for i, s in enumerate(specials)],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": None, "post_processor": begin("<s>", 1), "decoder": None,
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                      "byte_fallback": True, "vocab": vocab, "merges": merges}}


def begin(token, id):
    return {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}}


GPT4 = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"},
     "behavior": "Isolated", "invert": False}, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
END = {"eos_token": "<|endoftext|>", "bos_token": "<s>"}


def cases(bases):
    """Name, base, what differs from it in tokenizer.json, tokenizer_config.json, config.json, and further files."""
    first = len(bases["bytes"]["model"]["vocab"])
    bos = {"post_processor": begin("<s>", first + 1)}
    for name in ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizerFast"]:
        config = {"tokenizer_class": name, **NAMED}
        yield f"{name}", "pieces", {}, config, "llama", {}
        yield f"{name} legacy", "pieces", {}, {**config, "legacy": True}, "llama", {}
        yield f"{name} without prefix space", "pieces", {}, {**config, "add_prefix_space": False, "add_bos_token": False}, "llama", {}
        yield f"{name} without post-processor", "pieces", {"post_processor": None}, {**config, "legacy": None}, None, {}
        yield f"{name} with Metaspace", "pieces", {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                                                                                         "split": True}}, config, "gemma3_text", {}
        yield f"{name} of a mapped type", "pieces", {}, config, "phi3", {}
    for name in ["GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizerFast", "CohereTokenizerFast", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "LlamaTokenizerFast",
                 "PreTrainedTokenizerFast", "NoSuchTokenizer"]:
        config = {"tokenizer_class": name, **END}
        yield f"{name} GPT-4", "bytes", GPT4, config, "exaone4", {}
        yield f"{name} prefix space", "bytes", {}, {**config, "add_prefix_space": True, "unk_token": None}, "exaone4", {}
        yield f"{name} BOS", "bytes", bos, {**config, "add_bos_token": True, "add_eos_token": True}, "exaone4", {}
        yield f"{name} normalizer", "bytes", {"normalizer": {"type": "Lowercase"}}, config, None, {}
        yield f"{name} ignore merges", "bytes", {**GPT4, **bos, "model": {"ignore_merges": True}}, config, "deepseek_v3", {}
        yield f"{name} of stablelm", "bytes", GPT4, config, "stablelm", {}
        yield f"{name} of qwen3_5", "bytes", GPT4, config, "qwen3_5", {}
        yield f"{name} of qwen2", "bytes", GPT4, {**config, "legacy": True}, "qwen2", {}
    for model in ["gemma2", "cohere2", "qwen3", "llama", "olmo2", "gpt_neox", "starcoder2", "nosuch"]:
        yield f"no class, {model}", "pieces" if model == "gemma2" else "bytes", {}, END if model != "gemma2" else NAMED, model, {}
    yield "class in config.json", "bytes", {**GPT4}, END, "exaone4", {"config.json": {"model_type": "exaone4", "tokenizer_class": "GPT2TokenizerFast"}}
    yield "no tokenizer_config.json", "bytes", GPT4, None, "llama", {}
    yield "pad token of the file", "bytes", {"padding": {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                                                        "pad_token": "<pad>"}}, {"tokenizer_class": "PreTrainedTokenizerFast"}, "llama", {}
    wide = {"content": "<|wide|>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    for name in ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "CohereTokenizer", "GPT2Tokenizer", "LlamaTokenizer"]:
        config = {"tokenizer_class": name, **NAMED}
        yield f"{name} flags", "bytes", {}, {**config, "added_tokens_decoder": {str(first + 5): wide, "9999": added(0, "<|more|>", normalized=True, special=False)}}, "llama", {}
        yield f"{name} extra", "bytes", {}, {**config, "extra_special_tokens": ["<|new|>", "<|wide|>"], "image_token": "<|img|>",
                                             "added_tokens_decoder": {str(first + 5): wide}}, "llama", {}
        yield f"{name} named", "bytes", {}, {**config, "extra_special_tokens": {"x_token": "<|new|>"}, "image_token": "<|img|>", "pad_token": {
            "__type": "AddedToken", "content": "<pad>", "lstrip": True, "rstrip": False, "normalized": True, "single_word": False}}, "llama", {}
        yield f"{name} older files", "bytes", {}, {"tokenizer_class": name, "image_token": "<|img|>", "bos_token": "</s>"}, "llama", {
            "special_tokens_map.json": {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False},
                                        "additional_special_tokens": ["<|new|>"], "unk_token": "<unk>"}, "added_tokens.json": {"<|more|>": 777, "<pad>": 776}}
    for key, value in [("additional_special_tokens", ["<|new|>", "<|wide|>"]), ("extra_special_tokens", []), ("eos_token", "<|more|>"), ("sep_token", "12")]:
        yield f"{key} alone", "pieces", {}, {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED, "additional_special_tokens": ["<|img|>"], key: value}, "llama", {}


def write(folder, base, overrides, config, model, files):
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, **base, **overrides}
    tokenizer["model"] = {**base["model"], **overrides.get("model", {})}
    for name, value in {"tokenizer.json": tokenizer, "tokenizer_config.json": config, "config.json": model and {"model_type": model}, **files}.items():
        if value is not None:
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                json.dump(value, file)


def main(version, engine, out):
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if engine == "sglang":
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../test/parity"))
        import folders

        load = folders.loader("sglang", os.environ["SGLANG_SOURCES"])
    else:
        from transformers import AutoTokenizer

        load = AutoTokenizer.from_pretrained
    bases = {"bytes": bytes_base(), "pieces": pieces_base()}
    known = {"texts": TEXTS, "bases": bases, "cases": []}
    if os.path.exists(out):
        with open(out, encoding="utf-8") as file:
            known = json.load(file)
    for i, (name, base, overrides, config, model, files) in enumerate(cases(bases)):
        if i == len(known["cases"]):
            files = {k: v for k, v in {"tokenizer_config.json": config, "config.json": model and {"model_type": model}, **files}.items() if v is not None}
            known["cases"].append({"name": name, "base": base, "overrides": overrides, "files": files, "wants": []})
        with tempfile.TemporaryDirectory() as folder:
            write(folder, bases[base], overrides, config, model, files)
            try:
                tokenizer = load(folder)
                want = {"ids": [list(tokenizer(text)["input_ids"]) for text in TEXTS], "names": tokenizer.special_tokens_map}
            except Exception as error:  # the engine does not start with such a folder
                want = {"error": type(error).__name__}
        for other in known["cases"][i]["wants"]:
            if {k: v for k, v in other.items() if k != "versions"} == want:
                other["versions"].append(f"{engine} {version}")
                break
        else:
            known["cases"][i]["wants"].append({"versions": [f"{engine} {version}"], **want})
    with open(out, "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(f'"{k}": {json.dumps(known[k])}' for k in ("texts", "bases")) + ',\n"cases": [\n')
        file.write(",\n".join(json.dumps(case) for case in known["cases"]) + "\n]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
