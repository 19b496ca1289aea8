"""Measures the CPU time of kvepp's tokenizer, Python's tokenizers, the tokenizers crate and fastokens, in one run.

Each engine is a separate process. It receives texts, and answers with their ids and the CPU time (of the whole process, with
all threads and garbage collection). In each round all engines get the same new texts, one engine after the other; the first
one changes from round to round. If ids differ, the comparison ends. README.md explains the figures.

The protocol is little endian. An engine first writes a line of JSON: load_ns (CPU time of loading), resident (growth of its
memory in RAM, bytes), and for kvepp also heap (bytes of live objects). A request is an operation (a byte), the number of texts
(uint32), and for each text its length in bytes (uint32) and its UTF-8. Operations and answers:

  e       encodes, and adds the model's special tokens: for each text CPU time (uint64, ns), number of ids (uint32), ids (uint32)
  b       kvepp only: the same for request bodies of /v1/chat/completions
  a       kvepp only: encodes all; objects and bytes allocated (uint64 each)
  1, 2    kvepp only: encodes all on that many threads; CPU time (uint64, ns)
"""

import argparse
import atexit
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

import texts
from report import bar, draw, goal

SIZES = {"1k": (1024, 32), "8k": (8192, 8), "64k": (65536, 2), "128k": (131072, 1)}  # tokens, and texts in a round
HARMONY = "gptoss"
BYTE_LEVEL = {"llama3_1", "qwen3", "gptoss", "deepseek_v3"}
THREAD_ROUNDS = 15
# Engines under their names in this file and in the tables. kvepp and fastokens+ cache segments between special tokens.
KVEPP, FAST, FAST_SEGMENTS, CRATE, PYTHON = "kvepp", "fastokens", "fastokens+", "HF crate", "HF Python"


class Engine:
    def __init__(self, name, command, cores=1):
        self.name = name
        held = {"GOMAXPROCS": str(cores), "RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | held)
        self.loaded = json.loads(self.process.stdout.readline() or sys.exit("%s does not start" % name))

    def read(self, form):
        raw = self.process.stdout.read(struct.calcsize("<" + form))
        if len(raw) < struct.calcsize("<" + form):
            sys.exit("%s ended" % self.name)
        return struct.unpack("<" + form, raw)

    def send(self, operation, batch):
        request = [struct.pack("<cI", operation, len(batch))]
        for text in batch:
            raw = text.encode()
            request += struct.pack("<I", len(raw)), raw
        self.process.stdin.write(b"".join(request))
        self.process.stdin.flush()

    def encode(self, batch, operation=b"e"):
        """The mean CPU time of a text in ns, and the ids of each text."""
        self.send(operation, batch)
        total, ids = 0, []
        for _ in batch:
            took, count = self.read("QI")
            total += took
            ids.append(self.read("%dI" % count))
        return total / len(batch), ids

    def close(self):
        self.process.stdin.close()
        if self.process.wait() != 0:
            sys.exit("%s failed" % self.name)


def same(model, engine, ids, want_from, want):
    if ids == want:
        return
    text = next(i for i in range(len(want)) if ids[i] != want[i])
    at = next((i for i, (a, b) in enumerate(zip(ids[text], want[text])) if a != b), min(len(ids[text]), len(want[text])))
    sys.exit("%s: %s and %s disagree at token %d of text %d: %s and %s" % (
        model, engine, want_from, at, text, ids[text][at:at + 5], want[text][at:at + 5]))


def interleaved(model, engines, batch, first):
    """CPU time by engine for a batch that no engine has seen, and for the same batch again."""
    turn = engines[first % len(engines):] + engines[:first % len(engines)]
    times, want, tokens = [], None, 0
    for _ in "unseen", "repeated":
        took = {}
        for engine in turn:
            took[engine.name], ids = engine.encode(batch)
            if want is None:
                want_from, want = engine.name, ids
            same(model, engine.name, ids, want_from, want)
        times.append(took)
    return times[0], times[1], sum(map(len, want)) / len(batch)


def chat(writer, size):
    """The messages of a chat of about size bytes: a system prompt, then ten turns. The last turn is a question."""
    messages = [{"role": "system", "content": writer.text(size // 8)}]
    for turn in range(10):
        messages.append({"role": "user", "content": writer.text(size * 3 // 80)})
        if turn < 9:
            messages.append({"role": "assistant", "content": writer.text(size * 5 // 90)})
    return messages


def body(messages):
    return json.dumps({"model": "m", "stream": True, "temperature": 0.7, "max_tokens": 512, "messages": messages}, ensure_ascii=False)


def median_of(rounds, name):
    return statistics.median(took[name] for took in rounds)


def ms(ns):
    return "%.3f" % (ns / 1e6) if ns < 1e7 else "%.1f" % (ns / 1e6)


def harmony_folder(folder):
    """A folder with the same files and a config.json that names the model type, so that no chat template is needed."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made)
    for name in os.listdir(folder):
        os.symlink(os.path.join(folder, name), os.path.join(made, name))
    with open(os.path.join(made, "config.json"), "w", encoding="utf-8") as config:
        json.dump({"model_type": "gpt_oss"}, config)
    return made


def measure(model, folder, programs, rounds):
    if model == HARMONY:
        folder = harmony_folder(folder)
    commands = {KVEPP: [programs.go, folder], FAST: [programs.rs, "fastokens", folder], FAST_SEGMENTS: [programs.rs, "fastokens-segments", folder],
                CRATE: [programs.rs, "hf", folder], PYTHON: [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizers-py.py"), folder]}
    engines = [Engine(name, command) for name, command in commands.items()]
    kvepp = engines[0]
    seeds = iter(range(1, 1 << 30))

    def new(count, size):
        return [texts.Writer("%s %d" % (model, next(seeds))).text(size) for _ in range(count)]

    # Encode other text first, so that word caches are as full as in a server that has run for a while.
    _, _, tokens = interleaved(model, engines, new(32, 32 << 10), 0)
    per_token = (32 << 10) / tokens
    print("\n%s (%.2f bytes a token)" % (model, per_token))
    print("  loading      " + "   ".join("%s %.2f s, %.0f MiB" % (e.name, e.loaded["load_ns"] / 1e9, e.loaded["resident"] / 2**20) for e in engines))
    print("               kvepp holds %.0f MiB of it" % (kvepp.loaded["heap"] / 2**20))
    print("  %-18s %11s" % ("ms of CPU", KVEPP) + "".join("%12s" % e.name for e in engines[1:])
          + "    kvepp ns/token   kvepp / peer         HF crate / kvepp")
    met = []
    for size, (count, prompts) in SIZES.items():
        unseen, repeated = [], []
        for r in range(rounds):
            first, again, tokens = interleaved(model, engines, new(prompts, int(count * per_token)), r)
            unseen.append(first)
            repeated.append(again)
        for label, took, peer in (size + " unseen", unseen, FAST), (size + " repeated", repeated, FAST_SEGMENTS):
            own, fast, hf = (median_of(took, name) for name in (KVEPP, peer, CRATE))
            print("  %-18s %11s" % (label, ms(own)) + "".join("%12s" % ms(median_of(took, e.name)) for e in engines[1:])
                  + "    %14.1f   %6.2f %-10s   %14.1f" % (own / tokens, own / fast, peer, hf / own))
            for engine in engines[1:]:
                bar("CPU of tokenizing, " + model, "%s: %s" % (label, engine.name), median_of(took, engine.name) / own)
            if label == "8k unseen":
                met.append(goal("8k unseen, times fastokens:", own / fast, 1.2 if model in BYTE_LEVEL else 1.3))
                met.append(goal("8k unseen, times less than the HF crate:", hf / own, 15 if model in BYTE_LEVEL else 5, True))
                base = own / tokens
            if label == "128k unseen":
                met.append(goal("128k unseen, ns a token beside 8k:", own / tokens / base, 1.1))

    batch = new(16, int(8192 * per_token))
    kvepp.send(b"a", batch)
    objects, size = kvepp.read("QQ")
    met.append(goal("8k unseen, objects allocated an encode:", objects / len(batch), 30))
    kvepp.send(b"a", batch)
    objects_again, size_again = kvepp.read("QQ")
    print("  kvepp allocates an encode: 8k unseen %.1f objects, %.0f kB; 8k repeated %.1f objects, %.0f kB" % (
        objects / len(batch), size / len(batch) / 1000, objects_again / len(batch), size_again / len(batch) / 1000))

    pair = [Engine(KVEPP, commands[KVEPP], cores=2) for _ in range(2)]
    for engine in pair:
        for _ in range(4):
            engine.send(b"2", new(16, 32 << 10))
            engine.read("Q")
    threads, processes = [], []
    for r in range(THREAD_ROUNDS):
        took = {}
        # The first batch after other work is slower for any engine, so one warm-up batch comes first, and then the
        # order changes.
        for operation in b"1", *((b"1", b"2") if r % 2 else (b"2", b"1")):
            pair[0].send(operation, new(16, int(8192 * per_token)))
            [took[operation]] = pair[0].read("Q")
        for engine in pair:
            engine.send(b"1", new(16, int(8192 * per_token)))
        threads.append(took[b"2"] / took[b"1"])
        processes.append(statistics.mean(engine.read("Q")[0] for engine in pair) / took[b"1"])
    for engine in pair:
        engine.close()
    two, apart = statistics.median(threads), statistics.median(processes)
    print("  8k unseen, CPU an encode beside one thread's: two threads %.2f; two processes, which share nothing but the machine, %.2f" % (two, apart))
    met.append(goal("two threads' CPU beside one's:", two, 1.05))

    with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as config:
        has_template = bool(json.load(config).get("chat_template"))
    if has_template or model == HARMONY:
        # All are created first, so that they follow each other as in a busy server: see README.md.
        chats = []
        for _ in range(rounds):
            first, then = [], []
            for _ in range(8):
                writer = texts.Writer("%s chat %d" % (model, next(seeds)))
                messages = chat(writer, int(8192 * per_token))
                first.append(body(messages))
                then.append(body(messages + [{"role": "assistant", "content": writer.text(1000)}, {"role": "user", "content": writer.text(300)}]))
            chats.append((first, then))
        unseen, grown = [], []
        for first, then in chats:
            took, ids = kvepp.encode(first, b"b")
            unseen.append(took)
            took, longer = kvepp.encode(then, b"b")
            grown.append(took)
        print("  chat, body to ids: unseen %s ms (%d tokens), grown by a turn %s ms (%d tokens)" % (
            ms(statistics.median(unseen)), len(ids[0]), ms(statistics.median(grown)), len(longer[0])))
        if model in BYTE_LEVEL:
            met.append(goal("chat of 8k tokens, unseen, ms:", statistics.median(unseen) / 1e6, 0.6))
            met.append(goal("chat of 8k tokens, grown by a turn, ms:", statistics.median(grown) / 1e6, 0.25))
    if model == "qwen3":
        met.append(goal("loading 150k tokens, s:", kvepp.loaded["load_ns"] / 1e9, 0.5))
        met.append(goal("memory of 150k tokens, MiB:", kvepp.loaded["heap"] / 2**20, 60))
    for line in met:
        print("  " + line)
    sys.stdout.flush()
    for engine in engines:
        engine.close()


def main():
    arguments = argparse.ArgumentParser(description="Compare tokenizers. test/bench/tokenizers.sh builds the programs and calls this.")
    arguments.add_argument("--go", required=True, help="the program bench-tokenizers")
    arguments.add_argument("--rs", required=True, help="the program tokenizers-rs")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    programs = arguments.parse_args()
    print("CPU time on one core, median of %d rounds in which all engines took turns; every engine gave the same ids for every text.\n"
          "HF crate: tokenizers 0.23.2; HF Python: tokenizers 0.23.3; fastokens 0.3.5, + with its segment cache, which kvepp always has." % programs.rounds)
    for model in programs.models:
        name, _, folder = model.partition("=")
        measure(name, folder, programs, programs.rounds)
    draw("tokenizers")


main()
