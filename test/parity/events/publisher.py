"""Publishes KV events with an engine's own publisher: its classes, its queue, its threads and sockets.

    publisher.py vllm|sglang SOURCES EVENTS_PORT REPLAY_PORT BUFFER_STEPS

SOURCES has the engine's package. One module of it is loaded; stubs replace what it imports from the rest of the engine.
REPLAY_PORT 0 means none. Prints "ready", then executes each line of standard input and confirms it on standard output:

    {"events": [...], "drop": false}    publishes a batch; with drop its live message is lost, and only the replay has it

Hashes in texts are hexadecimal digests.
"""

import dataclasses
import importlib.util
import json
import logging
import sys
import threading
import time
import types

import zmq


def stand_in(name, **attributes):
    """Creates a module of the engine, and its parents, with only these attributes."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        module = sys.modules.setdefault(path, types.ModuleType(path))
        module.__path__ = []
    vars(sys.modules[name]).update(attributes)


def load(engine, sources):
    if engine == "vllm":
        @dataclasses.dataclass
        class Config:
            enable_kv_cache_events: bool = False
            publisher: str = "null"
            endpoint: str = ""
            replay_endpoint: str = None
            buffer_steps: int = 0
            hwm: int = 0
            max_queue_size: int = 0
            topic: str = ""

        stand_in("vllm.config.kv_events", KVEventsConfig=Config)
        stand_in("vllm.logger", init_logger=logging.getLogger)
        stand_in("vllm.utils.network_utils", get_ip=None, get_tcp_uri=None, is_valid_ipv6_address=None, split_zmq_path=None)
        stand_in("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
        path, name = "vllm/distributed/kv_events.py", "vllm.distributed.kv_events"
    else:
        stand_in("sglang.srt.runtime_context", get_parallel=None)
        stand_in("sglang.srt.utils.network", NetworkAddress=None)
        path, name = "sglang/srt/disaggregation/kv_events.py", "sglang.srt.disaggregation.kv_events"
    spec = importlib.util.spec_from_file_location(name, f"{sources}/{path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lossy:
    """The publisher's socket, which drops a message if drop is set."""

    def __init__(self, socket):
        self.socket, self.drop, self.sent = socket, False, threading.Event()

    def send_multipart(self, frames):
        if not self.drop:
            self.socket.send_multipart(frames)
        self.sent.set()

    def __getattr__(self, name):
        return getattr(self.socket, name)


def hashed(event):
    """The event with its digests as bytes."""
    for key, value in event.items():
        if key == "block_hashes":
            event[key] = [bytes.fromhex(h) if isinstance(h, str) else h for h in value]
        elif key == "parent_block_hash" and isinstance(value, str):
            event[key] = bytes.fromhex(value)
    return event


def main(engine, sources, events_port, replay_port, buffer_steps):
    module = load(engine, sources)
    bind = zmq.Socket.bind
    zmq.Socket.bind = lambda socket, address: bind(socket, address.replace("*", "127.0.0.1"))  # on loopback only
    publisher = module.ZmqEventPublisher(
        0, endpoint=f"tcp://*:{events_port}", replay_endpoint=f"tcp://*:{replay_port}" if replay_port != "0" else None, buffer_steps=int(buffer_steps))
    publisher._pub = Lossy(publisher._pub)
    classes = {c.__name__: c for c in (module.BlockStored, module.BlockRemoved, module.AllBlocksCleared)}
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        events = [classes[e.pop("type")](**hashed(e)) for e in command["events"]]
        publisher._pub.drop = command["drop"]
        publisher._pub.sent.clear()
        publisher.publish(module.KVEventBatch(ts=time.time(), events=events))
        publisher._pub.sent.wait()
        print("sent", flush=True)


main(*sys.argv[1:])
