"""Writes variants.json: what Hugging Face tokenizers makes of texts with every component that package bpe knows.

The vocabulary is learnt across words, spaces and punctuation, so that a piece cut in the wrong place gives other ids.
Needs: pip install tokenizers==0.23.3. Run in this folder: python3 variants_gen.py
"""

import json
import random

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace("{1,3}", "")
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_APOSTROPHE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = _WORD + _APOSTROPHE + "|" + _UPPER + _APOSTROPHE + r"|\p{N}{1,3}" + _REST
TEKKEN = _WORD + "|" + _UPPER + r"|\p{N}" + _REST
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]

WORDS = (
    "don't I'LL we've it'ſ THEY'RE HELLO world CamelCase xMLHttp ABCdef Ǆungla ǅ 12345 3.14 1000000 ²³ Ⅷ٣ 漢字かなカナ 한국어 עברית नमस्ते ไทย "
    "😀👍🏽 e\u0301le\u0300ve \u0301x x=1; a/b//c /* */ $100 ... _id __init__ #tag @you (a) [b] {c} <d> «e» — “f” 'quoted' \"x\" \\n"
).split(" ")
SPACES = [" ", "  ", "    ", "\t", "\n", "\n\n", " \n", "\n ", "\r\n", "\u00a0", "\u3000", "\u2028", " \u00a0", "\x85"]


def texts():
    rng = random.Random(11)
    made = ["", " ", "\n", "'s", " 's", "a's b'S c'ſ", "a\u0301", "\u0301", "1234567", " 1", "  x", "x  ", "\n\nx", " \n x", "...\n\n...", "/\n/", "ＡＢＣ"]
    for _ in range(90):
        made.append("".join(rng.choice(WORDS) + rng.choice(SPACES + [""]) for _ in range(rng.randrange(1, 9))))
    return made


ADDED_TEXTS = [
    "a<x>b", "a <x> b", "a  <x>  b", "<x><x>", "<x>", " <x>", "<x> ", "a<l>b", "a \n<l> b", "a<r> \n b", "a <lr> b", "  <lr>\n\n<lr>  ", "<r> <l>",
    "word", "a word b", "words", "sword", "a-word-b", "word_", "_word", "word1", "wordé", "ⅷword", "word²", "ⓐword", "word\u200d", "‿word", "漢word",
    "<x", "<xx>", "<x>y>", "<xy>", "<xyz", "ab<xyz>", "<nospace>a", "Ünïcödé <norm> x", "a<norm>b", "e\u0301<norm>", "caf\u00e9", "cafe\u0301", "\u212bngstr\u00f6m",
    "<r>\nA", "<r>\n\n<x>", "<r> \n <x>", "a\nb", "\n\n",
]


def added(content, identifier, **flags):
    token = {"id": identifier, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {**token, **flags}


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": [*parts, BYTES]}


def template(single, **ids):
    return {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}} if s == "$A" else {"SpecialToken": {"id": s, "type_id": 0}} for s in single],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {s: {"id": s, "ids": list(i), "tokens": [s] * len(i)} for s, i in ids.items()},
    }


def bytes_base():
    """Byte-level BPE learnt across everything, so that a piece cut in the wrong place gives other ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(texts() * 2, trainer)
    return json.loads(tokenizer.to_str())


def runes_base():
    """SentencePiece-style BPE: characters, with bytes for those that it does not know, and an unknown token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, limit_alphabet=150, show_progress=False)
    tokenizer.train_from_iterator([t[:400] for t in texts()] * 2, trainer)
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [t for t in file["added_tokens"] if not t["content"].startswith("<0x")]
    file["normalizer"] = None
    return file


def replace(pattern, content, key="Regex"):
    return {"type": "Replace", "pattern": {key: pattern}, "content": content}


def several(*parts):
    return {"type": "Sequence", "normalizers": list(parts)}


def stages(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


def metaspace(scheme, cut, **more):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": cut, **more}


QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
POSSESSIVE = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s".replace("(?i:[sdmt]|ll|ve|re)", "(?:[sdmtSDMT]|ll|ve|re)")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DIGITS = {"type": "Digits", "individual_digits": True}
GPT2 = {**BYTES, "use_regex": True}

# Families of models, by the shape of their configuration, and then every component, each in its variations.
FAMILIES = [
    ("family Llama 4", "bytes", {"pre_tokenizer": sequence(split(O200K)), "post_processor": template(["<b>", "$A"], **{"<b>": [7]})}),
    ("family Qwen 2", "bytes", {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence(split(QWEN)), "post_processor": {**BYTES, "trim_offsets": False}}),
    ("family Qwen 3.5", "bytes", {"normalizer": {"type": "NFC"}, "pre_tokenizer": sequence(split(QWEN35))}),
    ("family GPT-2", "bytes", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}}),
    ("family GPT-NeoX", "bytes", {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}}),
    ("family RoBERTa", "bytes", {
        "pre_tokenizer": {**GPT2, "add_prefix_space": True},
        "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True, "add_prefix_space": True},
    }),
    ("family Phi", "bytes", {"pre_tokenizer": GPT2, "added_tokens": "some"}),
    ("family SmolLM", "bytes", {"pre_tokenizer": stages(DIGITS, GPT2)}),
    ("family StarCoder", "bytes", {"pre_tokenizer": stages(DIGITS, {**GPT2, "add_prefix_space": True})}),
    ("family GLM", "bytes", {"pre_tokenizer": sequence(split(CL100K)), "model": {"ignore_merges": True}}),
    ("family Kimi, as an expression", "bytes", {"pre_tokenizer": sequence(split(KIMI)), "model": {"ignore_merges": True}}),
    ("family cl100k, possessive", "bytes", {"pre_tokenizer": sequence(split(POSSESSIVE))}),
    ("family Bloom", "bytes", {"pre_tokenizer": sequence(split(BLOOM))}),
    ("family Falcon", "bytes", {"pre_tokenizer": stages({"type": "Punctuation", "behavior": "Contiguous"}, GPT2, {"type": "Digits", "individual_digits": False}, split("[0-9][0-9][0-9]"))}),
    ("family Llama 2", "runes", {"normalizer": several({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁", "String"))}),
    ("family Gemma", "runes", {"normalizer": replace(" ", "▁", "String"), "pre_tokenizer": split(" ", "MergedWithPrevious") | {"pattern": {"String": " "}}}),
] + [(f"family Mistral, {scheme}, split {cut}", "runes", {"pre_tokenizer": metaspace(scheme, cut)}) for scheme in ("first", "always", "never") for cut in (False, True)] + [
    ("family Mistral, first, added", "runes", {"pre_tokenizer": metaspace("first", False), "added_tokens": "some"}),
    ("Metaspace, old names", "runes", {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}}),
    ("Metaspace after WhitespaceSplit", "runes", {"pre_tokenizer": stages({"type": "WhitespaceSplit"}, metaspace("first", True))}),
    ("Metaspace first, NFKC", "runes", {"normalizer": {"type": "NFKC"}, "pre_tokenizer": metaspace("first", True)}),
    ("no fallback", "runes", {"normalizer": replace(" ", "▁", "String"), "model": {"byte_fallback": False}}),
    ("no fallback, not fused", "runes", {"normalizer": replace(" ", "▁", "String"), "model": {"byte_fallback": False, "fuse_unk": False}}),
    ("no unknown token", "runes", {"normalizer": replace(" ", "▁", "String"), "model": {"byte_fallback": False, "unk_token": None}}),
    ("ignore_merges of characters", "runes", {"normalizer": replace(" ", "▁", "String"), "model": {"ignore_merges": True}}),
    ("BertProcessing", "runes", {"post_processor": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}}),
    ("ByteLevel without a pattern", "bytes", {"pre_tokenizer": BYTES}),
] + [
    (f"normalizer {n['type']}", base, {"normalizer": n, "pre_tokenizer": pre, "added_tokens": "some"})
    for base, pre in (("bytes", GPT2), ("runes", metaspace("always", False)))
    for n in (
        {"type": "NFC"}, {"type": "NFD"}, {"type": "NFKC"}, {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "Nmt"},
        {"type": "Strip", "strip_left": True, "strip_right": False}, {"type": "Prepend", "prepend": "xy "},
    )
] + [
    ("normalizer Strip, right", "bytes", {"normalizer": {"type": "Strip", "strip_left": False, "strip_right": True}, "pre_tokenizer": GPT2, "added_tokens": "some"}),
    ("normalizer Strip, both", "bytes", {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}, "pre_tokenizer": GPT2}),
    ("normalizer Replace", "bytes", {"normalizer": replace("aa", "a", "String"), "pre_tokenizer": GPT2}),
    ("normalizer Replace, to nothing", "bytes", {"normalizer": replace(" ", "", "String"), "pre_tokenizer": GPT2}),
    ("normalizer Replace of spaces", "bytes", {"normalizer": replace(r" {2,}|[\n\r\t]", " "), "pre_tokenizer": GPT2}),
    ("normalizer Replace, looking around", "bytes", {"normalizer": replace(r"x+(?=.)|\b.\B", "-"), "pre_tokenizer": GPT2}),
    ("normalizer CLIP", "bytes", {"normalizer": several({"type": "NFC"}, replace(r"\s+", " "), {"type": "Lowercase"}), "pre_tokenizer": sequence(split(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", "Removed", True))}),
    ("normalizer T5", "runes", {"normalizer": several({"type": "NFD"}, {"type": "StripAccents"}, {"type": "Strip", "strip_left": False, "strip_right": True}, replace(" {2,}", "▁")), "pre_tokenizer": metaspace("always", True)}),
] + [
    (f"Split {pattern!r} {behavior}{', inverted' * invert}", "bytes", {"pre_tokenizer": sequence(split(pattern, behavior, invert))})
    for pattern in (r"\p{P}+|[aeiou]", CL100K)
    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    for invert in (False, True)
] + [
    (f"Split on a String {behavior}", "bytes", {"pre_tokenizer": sequence({**split("x", behavior), "pattern": {"String": " "}})}) for behavior in ("Removed", "MergedWithPrevious", "MergedWithNext")
] + [
    (f"pre-tokenizer {p['type']} {p.get('behavior', '')}{p.get('individual_digits', '')}", base, {"pre_tokenizer": stages(p, *end)})
    for base, end in (("bytes", [BYTES]), ("runes", []))
    for p in (
        {"type": "Digits", "individual_digits": False}, DIGITS, {"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "BertPreTokenizer"},
        {"type": "CharDelimiterSplit", "delimiter": "e"},
        *({"type": "Punctuation", "behavior": b} for b in ("Isolated", "Removed", "MergedWithNext", "MergedWithPrevious", "Contiguous")),
    )
] + [
    (f"pattern {pattern!r}", "bytes", {"pre_tokenizer": sequence(split(pattern))})
    for pattern in (
        r"\w+|\W+", r"\b", r"\B.", r"^.|.$", r"(?<=[a-z])(?=[A-Z])", r"(?<!\s)\s", r"[[:alpha:]]".replace("[[:alpha:]]", r"[a-z[0-9]&&[^e5]]+"), r"(?>a+|\p{Lu}+)\S?", r"\p{Han}+|\p{Hiragana}+|\P{L}{2,5}?",
        r".*?[\x41\u00e9-\u{ffff}]".replace("\\u{ffff}", "\\uffff"), r"x*", r"(?i:'s|'t|'k)\d*|\D", r"\A.|\S\z", r"(a|b)*c?|[^\p{^Lu}]",
    )
]

ADDED = [
    ("<x>", {}), ("<l>", {"lstrip": True}), ("<r>", {"rstrip": True}), ("<lr>", {"lstrip": True, "rstrip": True}),
    ("word", {"single_word": True, "special": False}), ("<xyz>", {}), ("<norm>", {"normalized": True, "special": False}),
    ("caf\u00e9", {"normalized": True, "special": False}), ("\n", {"special": False}),
]


def families():
    """All of FAMILIES: name, base, overrides (of the model only what differs)."""
    bases = {"bytes": bytes_base(), "runes": runes_base()}
    out = []
    for name, base, overrides in FAMILIES:
        if overrides.get("added_tokens") == "some":
            known = bases[base]["added_tokens"]
            vocab = bases[base]["model"]["vocab"]
            new = [content for content, _ in ADDED if content not in vocab]
            ids = {content: vocab.get(content, len(vocab) + (new.index(content) if content in new else 0)) for content, _ in ADDED}
            overrides = {**overrides, "added_tokens": known + [added(content, ids[content], **flags) for content, flags in ADDED]}
        out.append((name + (" of characters" if base == "runes" and name.startswith(("normalizer", "pre-")) else ""), base, overrides))
    return bases, out


def whole(file, overrides):
    """A whole tokenizer.json."""
    model = {**file["model"], **overrides.get("model", {})}
    return json.dumps({**file, **overrides, "model": model})


def encode(tokenizer, text):
    """The ids, or None: tokenizers 0.23.3 panics on some texts whose first characters a normalizer removes."""
    try:
        return tokenizer.encode(text, add_special_tokens=True).ids
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        return None


def main():
    bases, variants = families()
    file = bases["bytes"]
    first = len(file["model"]["vocab"])
    some = [added(content, first + i, **flags) for i, (content, flags) in enumerate(ADDED)]
    older = [
        ("gpt2", {"pre_tokenizer": GPT2}),
        ("gpt2 as Split", {"pre_tokenizer": sequence(split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"))}),
        ("cl100k", {"pre_tokenizer": sequence(split(CL100K))}),
        ("cl100k, inverted", {"pre_tokenizer": sequence(split(CL100K, "Removed", True))}),
        ("qwen", {"pre_tokenizer": sequence(split(QWEN)), "normalizer": {"type": "NFC"}}),
        ("o200k", {"pre_tokenizer": sequence(split(O200K))}),
        ("tekken", {"pre_tokenizer": sequence(split(TEKKEN))}),
        ("deepseek", {"pre_tokenizer": sequence(*map(split, DEEPSEEK)), "normalizer": {"type": "Sequence", "normalizers": []}}),
        ("ignore_merges", {"pre_tokenizer": sequence(split(CL100K)), "model": {"ignore_merges": True}}),
        ("added", {"pre_tokenizer": sequence(split(CL100K)), "added_tokens": some}),
        ("added, NFC", {"pre_tokenizer": sequence(split(QWEN)), "added_tokens": some, "normalizer": {"type": "NFC"}}),
        ("added, Prepend", {
            "pre_tokenizer": sequence(split(QWEN)),
            "added_tokens": some,
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "xx"}]},
        }),
        ("template", {"pre_tokenizer": sequence(split(QWEN)), "post_processor": template(["<b>", "$A", "<e>", "<e>"], **{"<b>": [1, 2], "<e>": [3]})}),
        ("template in a Sequence", {
            "pre_tokenizer": sequence(split(QWEN)),
            "post_processor": {"type": "Sequence", "processors": [{**BYTES}, template(["<b>", "$A"], **{"<b>": [1]})]},
        }),
    ]
    out = {"bases": bases, "variants": []}
    rng = random.Random(12)
    for name, base, overrides in [(name, "bytes", overrides) for name, overrides in older] + variants:
        tokenizer = Tokenizer.from_str(whole(bases[base], overrides))
        sample = ADDED_TEXTS if "added_tokens" in overrides else texts()[:6] if "post_processor" in overrides else texts()
        if len(out["variants"]) >= len(older):
            sample = rng.sample(sample, min(len(sample), 12))
        answers = [(s, encode(tokenizer, s)) for s in sample]
        cases = [{"text": s, "ids": ids} for s, ids in answers if ids is not None]
        out["variants"].append({"name": name, "base": base, "overrides": overrides, "cases": cases})
    with open("variants.json", "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    main()
