"""Writes variants.json: what Hugging Face tokenizers makes of texts with every component that package tokenizer knows.

The vocabulary is learnt across words, spaces and punctuation, so that a piece cut in the wrong place gives other ids.
Needs: pip install tokenizers==0.23.3. Run in this folder: python3 variants_gen.py
"""

import json
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

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


def base():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(texts() * 2, trainer)
    return json.loads(tokenizer.to_str())


def main():
    file = base()
    first = len(file["model"]["vocab"])
    some = [
        added("<x>", first),
        added("<l>", first + 1, lstrip=True),
        added("<r>", first + 2, rstrip=True),
        added("<lr>", first + 3, lstrip=True, rstrip=True),
        added("word", first + 4, single_word=True, special=False),
        added("<xyz>", first + 5),
        added("<norm>", first + 6, normalized=True, special=False),
        added("caf\u00e9", first + 7, normalized=True, special=False),
        added("\n", first + 8, special=False),
    ]
    ignoring = {**file["model"], "ignore_merges": True}
    variants = [
        ("gpt2", {"pre_tokenizer": {**BYTES, "use_regex": True}}),
        ("gpt2 as Split", {"pre_tokenizer": sequence(split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"))}),
        ("cl100k", {"pre_tokenizer": sequence(split(CL100K))}),
        ("cl100k, inverted", {"pre_tokenizer": sequence(split(CL100K, "Removed", True))}),
        ("qwen", {"pre_tokenizer": sequence(split(QWEN)), "normalizer": {"type": "NFC"}}),
        ("o200k", {"pre_tokenizer": sequence(split(O200K))}),
        ("tekken", {"pre_tokenizer": sequence(split(TEKKEN))}),
        ("deepseek", {"pre_tokenizer": sequence(*map(split, DEEPSEEK)), "normalizer": {"type": "Sequence", "normalizers": []}}),
        ("ignore_merges", {"pre_tokenizer": sequence(split(CL100K)), "model": ignoring}),
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
    out = {"base": file, "variants": []}
    for name, overrides in variants:
        tokenizer = Tokenizer.from_str(json.dumps({**file, **overrides}))
        sample = ADDED_TEXTS if "added_tokens" in overrides else texts()[:6] if "post_processor" in overrides else texts()
        cases = [{"text": s, "ids": tokenizer.encode(s, add_special_tokens=True).ids} for s in sample]
        if overrides.get("model"):
            overrides = {**overrides, "model": {"ignore_merges": True}}
        out["variants"].append({"name": name, "overrides": overrides, "cases": cases})
    with open("variants.json", "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    main()
