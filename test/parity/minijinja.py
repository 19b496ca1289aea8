"""Says what Dynamo's frontend makes of the same chats with each of many templates.

    minijinja.py FOLDER CHATS WORK

Reads and answers the lines of corpus.py. FOLDER is a byte-level tokenizer, CHATS a file with a request's body on each line, WORK a
folder for models. The process is a frontend with Dynamo's own HTTP service, preprocessor and MiniJinja, and also the worker that it
sends token ids to; each template is a model of its own, for as long as it is asked about.
"""

import asyncio
import http.client
import itertools
import json
import os
import shutil
import socket
import sys
import threading

os.environ.setdefault("DYN_COMPUTE_THREADS", "0")
os.environ["DYN_LOG"] = "off"

from dynamo.llm import EngineType, EntrypointArgs, ModelInput, ModelType, RouterConfig, RouterMode, WorkerType, make_engine, register_model, run_input, unregister_model
from dynamo.runtime import DistributedRuntime

from corpus import hash_of
from folders import byte_chars

# How many models the frontend has at most: the one that is asked about, and the next ones, which it loads meanwhile.
AHEAD = 16


class Frontend:
    def __init__(self, folder, chats, work):
        self.folder, self.work, self.names, self.received = folder, work, itertools.count(), {}
        with open(chats, encoding="utf-8") as file:
            self.bodies = [json.loads(line) for line in file]
        with open(folder + "/tokenizer.json", encoding="utf-8") as file:
            file = json.load(file)
        self.special = {token["id"]: token["content"].encode() for token in file["added_tokens"]}
        byte_of = {c: b for b, c in enumerate(byte_chars())}
        self.bytes = {id: bytes(map(byte_of.__getitem__, token)) for token, id in file["model"]["vocab"].items() if id not in self.special}

    async def start(self):
        self.runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = EntrypointArgs(EngineType.Dynamic, http_host="127.0.0.1", http_port=port, router_config=RouterConfig(RouterMode.RoundRobin))
        service = asyncio.ensure_future(run_input(self.runtime, "http", await make_engine(self.runtime, arguments)))
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not service.done():
            try:
                self.call("GET", "/v1/models")
                return
            except OSError:  # it is not up yet
                self.connection.close()
                await asyncio.sleep(0.05)
        sys.exit(f"the frontend does not start: {service.exception()}")

    def call(self, method, path, body=None):
        self.connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        return response.status, response.read()

    async def open(self, template):
        """Makes a model with a template, and returns its name and its endpoint. The frontend does not know it at once."""
        name = f"m{next(self.names)}"
        folder = os.path.join(self.work, name)
        shutil.copytree(self.folder, folder)
        shutil.copyfile(template, folder + "/chat_template.jinja")

        async def generate(request, context=None):
            self.received[name] = request["token_ids"]
            yield {"token_ids": [100], "finish_reason": "stop"}

        endpoint = self.runtime.endpoint(f"corpus.{name}.generate")
        asyncio.ensure_future(endpoint.serve_endpoint(generate, graceful_shutdown=False))
        try:
            await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, folder, name, worker_type=WorkerType.Aggregated)
        except Exception as error:  # Dynamo's worker does not start
            return None, str(error)
        return name, endpoint

    def ready(self, name):
        """Waits until the frontend lists a model; false if it does not within 10 seconds, because its template does not compile."""
        for _ in range(200):
            if name in [model["id"] for model in json.loads(self.call("GET", "/v1/models")[1])["data"]]:
                return True
            threading.Event().wait(0.05)
        return False

    def ask(self, name, only=None):
        answers = []
        for body in self.bodies if only is None else self.bodies[only : only + 1]:
            self.received.pop(name, None)
            status, answer = self.call("POST", "/v1/chat/completions", {**body, "model": name, "max_tokens": 1})
            ids = self.received.get(name) if status == 200 else None
            if only is None:
                answers.append(hash_of(ids) if ids else None)
            else:
                answers.append(b"".join(self.special.get(i) or self.bytes[i] for i in ids).decode("utf-8", "replace") if ids else answer.decode()[:400])
        return answers


async def main(folder, chats, work):
    frontend = Frontend(folder, chats, work)
    await frontend.start()
    models = asyncio.Queue(AHEAD)

    async def open_all():
        while line := (await asyncio.to_thread(sys.stdin.readline)).rstrip("\n"):
            asked = json.loads(line) if line.startswith("{") else {"template": line, "chat": None}
            await models.put((*await frontend.open(asked["template"]), asked["chat"]))
        await models.put(None)

    opening = asyncio.ensure_future(open_all())
    while model := await models.get():
        name, endpoint, chat = model
        if name and await asyncio.to_thread(frontend.ready, name):
            answers = await asyncio.to_thread(frontend.ask, name, chat)
        else:
            answers = [None] * len(frontend.bodies) if chat is None else ["no model"]
        print(json.dumps(answers), flush=True)
        if name:
            await unregister_model(endpoint)
            shutil.rmtree(os.path.join(frontend.work, name))
    await opening
    sys.stdout.flush()
    os._exit(0)  # without Dynamo's graceful shutdown, which waits


asyncio.run(main(*sys.argv[1:]))
