"""Starts several vLLM servers in one process group.

    serve.py FILE

FILE is JSON: a list of [log file, arguments of "vllm serve"...]. vLLM is imported once, which takes most of its start;
each server and each engine core is then a fork. So vLLM's own code is not changed but where it would import itself
again: its processes are forked, not spawned, and it looks at the model's class in its own process. The program ends when
a server does.
"""

import json
import multiprocessing
import os
import signal
import sys

import vllm.entrypoints.cli.main as cli
import vllm.entrypoints.cli.serve  # noqa: F401
import vllm.entrypoints.openai.api_server  # noqa: F401
import vllm.model_executor.models.registry as registry
import vllm.v1.engine.core  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401
import transformers.models.auto.tokenization_auto  # noqa: F401

registry._run_in_subprocess = lambda look: look()
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def serve(log, arguments):
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["vllm", "serve", *arguments]
    cli.main()


def main():
    for log, *arguments in json.load(open(sys.argv[1])):
        if os.fork() == 0:
            serve(log, arguments)
            sys.exit()
    os.wait()
    os.killpg(0, signal.SIGKILL)


main()
