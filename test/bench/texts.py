"""Generates text like that of requests to models, from a seed: English prose, Markdown, Go and Python.

The same seed gives the same text on every machine; two seeds give different texts. Words come from words.txt with frequencies
by Zipf's law, and a few are invented. Names, numbers, links and non-ASCII characters are random. The parameters are set so that
Llama 3's pre-tokenizer finds as many new words as in real Go, Python and Markdown: of 100 pieces about 3 are neither in the
vocabulary nor seen before (real text: 2 to 4).
"""

import bisect
import itertools
import json
import os
import random

WORDS = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "words.txt"), encoding="utf-8").read().split()
# By Zipf's law the frequency of the r-th word is proportional to 1/r. The offset flattens the top, as in real text.
TOTALS = list(itertools.accumulate(1 / (rank + 2.7) for rank in range(len(WORDS))))
SYLLABLES = ("ba ber cla da del dra el fen gan gro hel in ish jor ka kel lan lo mar mi nor ol pa per qui ra ron sa shi ta tel "
             "tor u val ver wen xi yor zan ze").split()
FOREIGN = ["naïve", "Zürich", "São Paulo", "déjà vu", "Москва", "東京都", "你好，世界", "한국어", "مرحبا", "±0.5 °C", "→", "…", "€ 20", "🙂", "🚀",
           "façade", "Ελλάδα", "“quoted”", "it’s", "–"]


class Writer:
    """Writes pieces of text. Of random.Random it uses only random(): Python keeps its sequence the same in all versions."""

    def __init__(self, seed):
        self.random = random.Random(seed).random
        self.names, self.invented = [], []

    def below(self, n):
        return int(self.random() * n)

    def one(self, things):
        return things[self.below(len(things))]

    def word(self):
        if self.random() < 0.02:
            if not self.invented or self.random() < 0.4:
                self.invented.append("".join(self.one(SYLLABLES) for _ in range(2 + self.below(3))))
            return self.one(self.invented[-40:])
        return WORDS[bisect.bisect(TOTALS, self.random() * TOTALS[-1])]

    def words(self, low, high):
        return [self.word() for _ in range(low + self.below(high - low + 1))]

    def number(self):
        style, n, small = self.below(7), self.below(10 ** (1 + self.below(5))), self.below(60)
        return ["%d" % n, "%d" % n, "%d,%03d" % (n, self.below(1000)), "%d.%d" % (n, small), "0x%x" % n, "v%d.%d" % (small, n), "%d%%" % n][style]

    def name(self):
        """An identifier; often an earlier one, as in real code."""
        if self.names and self.random() < 0.4:
            return self.one(self.names[-40:])
        words = self.words(1, 3)
        style = self.below(4)
        if style == 0:
            name = "_".join(words)
        elif style == 1:
            name = "".join(word.capitalize() for word in words)
        elif style == 2:
            name = words[0] + "".join(word.capitalize() for word in words[1:])
        else:
            name = words[0]
        self.names.append(name)
        return name

    def sentence(self):
        words = self.words(6, 24)
        for i in range(len(words)):
            chance = self.random()
            if chance < 0.02:
                words[i] = self.number()
            elif chance < 0.035:
                words[i] = "`" + self.name() + "`"
            elif chance < 0.05:
                words[i] = words[i].capitalize()
            elif chance < 0.056:
                words[i] = self.one(FOREIGN)
            elif chance < 0.06:
                words[i] = "https://%s.example/%s/%s?%s=%s" % (self.word(), self.word(), self.name(), self.word(), self.number())
            elif chance < 0.075:
                words[i] = "(" + words[i] + ")"
            elif chance < 0.13 and i + 1 < len(words):
                words[i] += self.one([",", ",", ",", ";", ":", " -"])
            elif chance < 0.14:
                words[i] += self.one(["'s", "n't", "'re", "'ll"])
        return words[0][:1].upper() + " ".join(words)[1:] + self.one([".", ".", ".", ".", "?", "!"])

    def prose(self):
        return " ".join(self.sentence() for _ in range(2 + self.below(5))) + "\n\n"

    def markdown(self):
        kind = self.below(4)
        if kind == 0:
            return "#" * (1 + self.below(4)) + " " + " ".join(self.words(2, 6)).capitalize() + "\n\n"
        if kind == 1:
            return "".join("- **%s**: %s\n" % (self.name(), self.sentence()) for _ in range(2 + self.below(5))) + "\n"
        if kind == 2:
            head = self.words(3, 4)
            rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
            for _ in range(2 + self.below(5)):
                rows.append("| " + " | ".join(self.one([self.word, self.number, self.name])() for _ in head) + " |")
            return "\n".join(rows) + "\n\n"
        return "".join("%d. %s\n" % (i + 1, self.sentence()) for i in range(2 + self.below(4))) + "\n"

    def go(self):
        tab, lines = "\t", []
        lines.append("// %s %s" % (self.name(), self.sentence()))
        lines.append("func (%s *%s) %s(%s %s, %s []byte) (%s, error) {" % (self.word()[0], self.name(), self.name(), self.word(),
                                                                          self.one(["int", "string", "uint64", "*" + self.name()]), self.word(), self.name()))
        for _ in range(2 + self.below(6)):
            lines.append(self.one([
                lambda: "\tif %s.%s != nil && %s > %s {\n\t\treturn nil, fmt.Errorf(\"%s: %%w\", err)\n\t}" % (self.word(), self.name(), self.name(), self.number(), " ".join(self.words(2, 5))),
                lambda: "\tfor i, %s := range %s.%s {\n\t\t%s[i] += %s(%s)\n\t}" % (self.word(), self.word(), self.name(), self.name(), self.name(), self.word()),
                lambda: "\t%s, err := %s.%s(%s, %s)" % (self.word(), self.word(), self.name(), self.word(), self.number()),
                lambda: "\t%s := map[string]%s{\"%s\": %s, \"%s\": %s}" % (self.name(), self.word(), self.word(), self.number(), self.name(), self.number()),
                lambda: "\t// %s" % self.sentence(),
            ])())
        return "```go\n" + "\n".join(lines) + "\n" + tab + "return " + self.name() + ", nil\n}\n```\n\n"

    def python(self):
        lines = ["def %s(self, %s: %s = None, **%s):" % (self.name(), self.word(), self.one(["int", "str", "list[str]"]), self.word()),
                 '    """%s"""' % self.sentence()]
        for _ in range(2 + self.below(6)):
            lines.append(self.one([
                lambda: "    if not %s or len(self.%s) >= %s:\n        raise ValueError(f\"%s {%s!r}\")" % (self.word(), self.name(), self.number(), " ".join(self.words(2, 6)), self.word()),
                lambda: "    %s = [%s.%s() for %s in self.%s if %s != '%s']" % (self.name(), self.word(), self.name(), self.word(), self.name(), self.word(), self.word()),
                lambda: "    self.%s[\"%s\"] = %s  # %s" % (self.name(), self.name(), self.number(), " ".join(self.words(3, 9))),
                lambda: "    with %s.%s(%s) as %s:\n        %s.%s(%s)" % (self.word(), self.name(), self.number(), self.word(), self.word(), self.name(), self.word()),
            ])())
        return "\n".join(lines) + "\n    return " + self.name() + "\n\n\n"

    def json(self):
        return "```json\n" + json.dumps({self.name(): self.one([self.below(1 << 20), self.word(), self.words(1, 4), {self.name(): self.random()}])
                                         for _ in range(3 + self.below(5))}, indent=2) + "\n```\n\n"

    def text(self, size):
        """From size-8 to size bytes of UTF-8."""
        pieces, have = [], 0
        while have < size:
            kind = self.random()
            make = self.prose if kind < 0.5 else self.markdown if kind < 0.7 else self.go if kind < 0.82 else self.python if kind < 0.94 else self.json
            pieces.append(make())
            have += len(pieces[-1].encode())
        return "".join(pieces).encode()[:size].decode("utf-8", "ignore")


if __name__ == "__main__":
    print(Writer(1).text(4000))
