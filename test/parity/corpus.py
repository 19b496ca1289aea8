"""Says what an engine's own code makes of the same chats with each of many templates.

    corpus.py vllm|sglang SOURCES FOLDER CHATS

SOURCES and FOLDER are those of engines.py, CHATS a file with a request's body on each line. Reads names of files with a template
from standard input, and answers each with a line: [answer, ...], one for each body: the hash of the ids as below, or null if the
engine refuses the body. A line {"template": FILE, "chat": N} asks for one prompt instead, and is answered with [text or error].
"""

import array
import hashlib
import json
import logging
import sys

import engines


def hash_of(ids):
    return hashlib.sha256(array.array("i", ids).tobytes()).hexdigest()[:16]


def main(engine, sources, folder, chats):
    from transformers import AutoTokenizer

    logging.disable(logging.CRITICAL)  # what goes wrong is in the answers
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = {"vllm": engines.VLLM, "sglang": engines.SGLang}[engine](sources, tokenizer)
    with open(chats, encoding="utf-8") as file:
        bodies = [line for line in file]
    for line in sys.stdin:
        asked = json.loads(line) if line.startswith("{") else None
        with open(asked["template"] if asked else line.rstrip("\n"), encoding="utf-8", newline="") as file:
            template = file.read()
        answers = []
        for body in bodies[asked["chat"]:asked["chat"] + 1] if asked else bodies:
            try:
                text, ids = engine.text(template, "auto", None, json.loads(body))
                answers.append((text or tokenizer.decode(ids)) if asked else hash_of(ids))
            except Exception as error:  # the engine answers it with an error, or the template raised one
                answers.append(f"{type(error).__name__}: {error}"[:400] if asked else None)
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
