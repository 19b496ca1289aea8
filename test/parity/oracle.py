"""Says what the Python originals make of texts, a JSON line each: {"text": ..., "ids": [...], "special": [...]}.

    oracle.py encode FOLDER STRINGS RANDOM [NATIVE]
        Encodes STRINGS texts of real kinds and RANDOM random ones with the tokenizer.json of FOLDER (Hugging Face
        tokenizers). special are the ids with special tokens, null where they are the same. With NATIVE, a tekken file, every
        text is also encoded by mistral-common, and a difference ends the program.
    oracle.py mistral FOLDER
        Converts the tokenizer files inside mistral-common as Transformers does, each into a folder of its own in FOLDER, and
        prints their names, and the native file where there is one to compare with.
    oracle.py families FOLDER
        Trains small vocabularies and puts configurations of the shape of many families, and of every component, over them, each
        into a folder of its own in FOLDER; prints their names.

Needs what test/tools/oracles/requirements.txt lists. The texts depend on the numbers and the model's added tokens alone.
"""

import base64
import json
import os
import random
import sys
import unicodedata

from tokenizers import Tokenizer

LANGUAGES = [
    "The harbour was quiet, and nobody expected the boats back before evening; they'd said so, hadn't they? IT'S FINE.",
    "Voici l'été : les élèves n'étaient pas là, où sont-ils ? « Peut-être », dit-elle, à 15 h 30.",
    "Größere Straßen führen über Köln; die Übung kostet 1.234,56 €, sagt Jürgen. Donaudampfschifffahrtsgesellschaft!",
    "El niño comió piñas; ¿cuántas? ¡Muchísimas! Años después volvió al pingüino.",
    "Быстрая лиса перепрыгнула через ленивую собаку, а потом — ещё раз. Ёлка стоит 3 500 ₽.",
    "Η γρήγορη αλεπού πήδηξε πάνω από το τεμπέλικο σκυλί. Ὦ ἄνδρες Ἀθηναῖοι.",
    "敏捷的棕色狐狸跳过了懒狗。今天是2024年12月31日，星期二。「你好」，她说。𠀀𠮷",
    "すばやい茶色のキツネは、のろまな犬を飛び越えた。カタカナとひらがな、ｶﾞｷﾞ、東京２０２４。",
    "빠른 갈색 여우가 게으른 개를 뛰어넘었다. 오늘은 12월 31일입니다. 한국어 한글",
    "الثعلب البني السريع يقفز فوق الكلب الكسول. السَّلامُ عليكم ١٢٣٤٥",
    "השועל החום המהיר קופץ מעל הכלב העצלן. שָׁלוֹם 42",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है। क्षत्रिय १२३",
    "দ্রুত বাদামী শিয়াল অলস কুকুরের উপর লাফ দেয়। ১২৩৪",
    "விரைவான பழுப்பு நரி சோம்பேறி நாயின் மீது குதிக்கிறது. ௧௨௩",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ ๑๒๓๔ น้ำ",
    "Con cáo nâu nhanh nhẹn nhảy qua con chó lười. Tiếng Việt: Nguyễn Thị Ngọc, đường Lê Lợi.",
    "Hızlı kahverengi tilki; İstanbul'da ılık bir gün. IĞDIR, ığdır, İĞDE.",
    "სწრაფი ყავისფერი მელა. ՀԱՅԱՍՏԱՆ Հայաստան և ﬁn ﬂ ﬀ. ᏣᎳᎩ ꮳꮃꭹ",
    "မြန်မာဘာသာ ភាសាខ្មែរ ພາສາລາວ བོད་སྐད་ አማርኛ ትግርኛ ߒߞߏ",
]
CODE = [
    "def f(x: int = 3) -> dict[str, Any]:\n    return {'a': x ** 2, \"b\": [i for i in range(10)]}  # ok\n\n\nclass A:\n\tpass\n",
    "func (s *Server) Process(stream pb.X_ProcessServer) (err error) {\n\tfor i := 0; i < len(s.items); i++ {\n\t\tif err != nil {\n\t\t\treturn fmt.Errorf(\"x: %w\", err)\n\t\t}\n\t}\n}\n",
    '{"messages":[{"role":"user","content":"Hi!\\n"}],"max_tokens":128,"temperature":0.7,"stream":true,"x":null}',
    "<html>\n  <body class=\"a b\">&nbsp;<br/>\n</body></html>\r\n\r\n<!-- c -->",
    "SELECT COUNT(*) FROM t1 WHERE a_b >= 10.5 AND c LIKE '%x_%'; -- done\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n# Title\n\n* item\n  * sub\n\n```go\nx := 1\n```\n---\n> quote **bold** _it_ [l](http://x.y/z?a=b&c=d#e)\n",
    "$ ls -la /var/log | grep '\\.gz$' && echo \"$HOME\" > ~/out.txt 2>&1\n",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), ∑ᵢ₌₁ⁿ xᵢ² ≤ 10⁻³ ± ½",
]
PIECES = [
    "'s", "'S", "'ſ", "'re", "'LL", "'x", "’s", "a", "Z", "é", "e\u0301", "É", "ǅ", "ʰ", "漢", "か", "ー", "한", "ᄒ", "ᅡ", "ᆫ", "1", "23", "4567", "²", "Ⅷ",
    "٣", " ", "  ", "   ", "        ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u3000", "\u0085", "\u2028", "\u2029",
    "\x0b", "\x0c", "\x1c", "\x1f", "\u200b", "\u200d", "\ufeff", "\u2060", ".", "...", "/", "//", "-", "--", "----", "_", "__", "$", "<", ">", "<|", "|>",
    "…", "«", "“", "😀", "👍🏽", "👨‍👩‍👧", "🇩🇪", "\u0301", "\u0903", "\u0308\u0301", "\x00", "\x01", "\x7f", "ab", "AB", "aB", "Ab", "the", " the", "The", "ing",
    "▁", "▁▁", "▁the", "Ġ", "Ċ", "<0x0A>", "ﬁ", "Å", "Ω", "ｱ", "Ａ", "①", "㍿", "\U0001d400", "\U0010ffff", "\ue000", "\uffff", "\ufffd", "İ", "ß", "ẞ", "ς",
]


def real_texts(rng, added):
    """Endless texts of the kinds that prompts are made of."""
    corpus = LANGUAGES + CODE
    while True:
        kind = rng.randrange(10)
        if kind < 3:
            text = rng.choice(corpus)
        elif kind < 5:  # a slice, which begins and ends anywhere
            whole = rng.choice(corpus) + rng.choice(["", " ", "\n", "\n\n"]) + rng.choice(corpus)
            start = rng.randrange(len(whole))
            text = whole[start : start + rng.randrange(1, 160)]
        elif kind == 5:  # long
            text = rng.choice(["\n", "\n\n", " ", ""]).join(rng.choice(corpus) for _ in range(rng.choice([8, 20, 60])))
        elif kind == 6:  # a chat
            tokens = added or ["<x>"]
            parts = []
            for _ in range(rng.randrange(1, 8)):
                parts += [rng.choice(tokens), rng.choice(["", " ", "\n", "\n\n", "user\n"]), rng.choice(corpus)[: rng.randrange(80)]]
            text = "".join(parts)
        elif kind == 7:  # what is nearly an added token, or touches one
            token = rng.choice(added or ["<x>"])
            cut = rng.randrange(len(token) + 1)
            text = rng.choice(["", "a", " ", "é", "\n", "_"]) + rng.choice([token[:cut], token[cut:], token.upper(), token + token, token]) + rng.choice(["", "a", " ", "  b", "\n", "_"])
        elif kind == 8:  # long runs
            text = rng.choice(PIECES) * rng.choice([2, 7, 16, 33, 100, 257])
        else:
            text = " ".join("".join(rng.choice("etaoinshrdlucmfwypvbgkjqxz") for _ in range(rng.randrange(1, 12))) for _ in range(rng.randrange(1, 30)))
            text = rng.choice([text, text.title(), text.upper(), text.replace(" ", "_"), text.replace(" ", "")])
        yield text


def random_texts(rng, added):
    """Long texts without sense."""
    blocks = [(0x20, 0x7F), (0x20, 0x7F), (0, 0x100), (0x100, 0x590), (0x300, 0x370), (0x590, 0x1000), (0x1000, 0x2000), (0x2000, 0x2C00), (0x2C00, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x20000, 0x110000)]
    point = 0
    while True:
        parts = []
        for _ in range(rng.randrange(1, 16)):
            kind = rng.randrange(12)
            if kind < 5:
                parts.append(rng.choice(PIECES))
            elif kind < 9:
                parts.append(chr(rng.randrange(*rng.choice(blocks))))
            elif kind == 9:  # every code point in turn
                point = (point + 1) % 0x110000
                if 0xD800 <= point < 0xE000:
                    point = 0xE000
                if unicodedata.category(chr(point)) == "Cn" and rng.randrange(8):
                    point = (point + rng.randrange(200)) % 0xD800
                parts.append(rng.choice(["", " ", "a"]) + chr(point) + rng.choice(["", " ", "a", "1", "\u0301"]))
            elif kind == 10 and added:
                parts.append(rng.choice(added))
            else:
                parts.append(rng.choice(LANGUAGES)[: rng.randrange(12)])
        yield "".join(parts)


def batch(tokenizer, texts, special):
    """Encodings; None where tokenizers panics, as 0.23.3 does on some texts whose first characters a normalizer removes."""
    try:
        return tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        if len(texts) == 1:
            return [None]
    return batch(tokenizer, texts[: len(texts) // 2], special) + batch(tokenizer, texts[len(texts) // 2 :], special)


def encode(folder, strings, rand, native=None):
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = sorted(t.content for t in tokenizer.get_added_tokens_decoder().values())
    else:
        tokenizer = Tiktoken(folder)
        added = sorted(tokenizer.special)
    plain = None
    if native:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        plain = Tekkenizer.from_file(native)
    texts = real_texts(random.Random(41), added)
    fuzz = random_texts(random.Random(42), added)
    todo = [next(texts) for _ in range(strings)] + [next(fuzz) for _ in range(rand)]
    for i in range(0, len(todo), 1000):
        some = todo[i : i + 1000]
        without, with_special = batch(tokenizer, some, False), batch(tokenizer, some, True)
        for text, a, b in zip(some, without, with_special):
            if a is None or b is None:
                sys.stdout.write('{"panic":true}\n')
                continue
            if plain and not any(token in text for token in added) and plain.encode(text, bos=False, eos=False) != a.ids:
                sys.exit(f"mistral-common differs from Hugging Face tokenizers: {text!r}")
            line = {"text": text, "ids": a.ids, "special": None if a.ids == b.ids else b.ids}
            sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")


def mistral(folder):
    import mistral_common
    from transformers import LlamaTokenizer
    from transformers.integrations.mistral.tokenizer import MistralConverter

    data = os.path.join(os.path.dirname(mistral_common.__file__), "data")
    for name in sorted(os.listdir(data)):
        source = os.path.join(data, name)
        native = ""
        if name.startswith("tekken"):
            tokenizer, native = MistralConverter(source).converted(), source
        elif ".model" in name:
            tokenizer = sentencepiece(LlamaTokenizer, source)
        else:
            continue
        target = os.path.join(folder, "mistral-" + name.removesuffix(".json").replace(".model", ""))
        os.makedirs(target, exist_ok=True)
        tokenizer.save(os.path.join(target, "tokenizer.json"))
        print(json.dumps({"folder": target, "native": native}))


def families(folder):
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "prompt", "bpe", "testdata"))
    import variants_gen

    bases, variants = variants_gen.families()
    for i, (name, base, overrides) in enumerate(variants):
        target = os.path.join(folder, f"{i:03} " + "".join(c if c.isalnum() or c in " ,-." else "_" for c in name)[:60].strip())
        os.makedirs(target)
        with open(os.path.join(target, "tokenizer.json"), "w", encoding="utf-8") as f:
            f.write(variants_gen.whole(bases[base], overrides))
        print(json.dumps({"folder": target}))
    # A model like Kimi K2, without tokenizer.json: compared with tiktoken itself.
    target = os.path.join(folder, "tiktoken.model of Kimi's shape")
    os.makedirs(target)
    byte_of = {}
    others = 0x100
    for b in range(256):
        printable = 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE
        byte_of[chr(b if printable else others)] = b
        others += not printable
    vocab = sorted(bases["bytes"]["model"]["vocab"].items(), key=lambda item: item[1])
    with open(os.path.join(target, "tiktoken.model"), "wb") as f:
        for token, rank in vocab:
            f.write(base64.b64encode(bytes(byte_of[c] for c in token)) + b" %d\n" % rank)
    added = {str(len(vocab) + i): {"content": content} for i, content in enumerate(["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>"])}
    with open(os.path.join(target, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}, f)
    print(json.dumps({"folder": target}))


class Tiktoken:
    """tiktoken with Kimi's pattern, and its special tokens recognised everywhere, in the form of a Tokenizer."""

    def __init__(self, folder):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "prompt", "bpe", "testdata"))
        import tiktoken
        import variants_gen

        lines = open(os.path.join(folder, "tiktoken.model"), "rb").read().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as f:
            named = json.load(f)["added_tokens_decoder"]
        ids = range(len(ranks), len(ranks) + 256)
        self.special = {named.get(str(i), {"content": f"<|reserved_token_{i}|>"})["content"]: i for i in ids}
        self.encoding = tiktoken.Encoding("kimi", pat_str=variants_gen.KIMI, mergeable_ranks=ranks, special_tokens=self.special)

    def encode_batch_fast(self, texts, add_special_tokens):
        class Encoding:
            def __init__(self, ids):
                self.ids = ids

        return [Encoding(self.encoding.encode(text, allowed_special="all")) for text in texts]


def sentencepiece(cls, source):
    """A SentencePiece file as Transformers reads it when there is no tokenizer.json."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(source, os.path.join(folder, "tokenizer.model"))
        return cls.from_pretrained(folder).backend_tokenizer


def main():
    match sys.argv[1:]:
        case ["encode", folder, strings, rand, *native]:
            encode(folder, int(strings), int(rand), *native)
        case ["mistral", folder]:
            mistral(folder)
        case ["families", folder]:
            families(folder)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
