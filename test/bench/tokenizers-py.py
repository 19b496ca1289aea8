"""Encodes texts with Python's tokenizers and measures their CPU time: tokenizers-py.py FOLDER. compare.py has the protocol."""

import json
import struct
import sys
import time

import tokenizers


def resident():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))


def settle():
    """Keeps the process busy for 8 ms before the clock starts, as all engines do; README.md says why."""
    start = time.process_time_ns()
    while time.process_time_ns() - start < 8_000_000:
        pass


def main():
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer

    def number():
        return struct.unpack("<I", stdin.read(4))[0]

    start, before = time.process_time_ns(), resident()
    tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
    stdout.write(json.dumps({"load_ns": time.process_time_ns() - start, "resident": resident() - before}).encode() + b"\n")
    stdout.flush()
    while operation := stdin.read(1):
        if operation != b"e":
            sys.exit("unknown operation %r" % operation)
        answers = []
        texts = [stdin.read(number()).decode() for _ in range(number())]
        settle()
        for text in texts:
            start = time.process_time_ns()
            ids = tokenizer.encode(text).ids
            answers.append((time.process_time_ns() - start, ids))
        for took, ids in answers:
            stdout.write(struct.pack("<QI%dI" % len(ids), took, len(ids), *ids))
        stdout.flush()


main()
