"""Publishes KV events with the Publisher of Dynamo's TensorRT-LLM worker, which polls an engine for them.

    trtllm.py RANKS BLOCK_SIZE ZMQ_PORT    over the publisher's own ZMQ socket, as for Dynamo's consolidator
    trtllm.py RANKS BLOCK_SIZE plane       over Dynamo's event plane, as endpoint trt.backend.generate of its discovery

A stub replaces the engine. Its events come from standard input, in TensorRT-LLM's own form, one JSON array per line; this
script numbers each rank's events. Prints "ready ID", with Dynamo's id of the worker.
"""

import asyncio
import itertools
import json
import queue
import sys
import types

# dynamo.trtllm.publisher imports it for metrics, which are not published here.
sys.modules["prometheus_client"] = types.SimpleNamespace(CollectorRegistry=object)

from dynamo.runtime import DistributedRuntime  # noqa: E402
from dynamo.trtllm.publisher import KvEventPublicationMode, get_publisher  # noqa: E402


class Engine:
    """The part of dynamo.trtllm's engine, and of the LLM in it, that produces events."""

    def __init__(self, ranks):
        self.llm = self
        self.ranks = ranks
        self.events = queue.SimpleQueue()

    def get_attention_dp_size(self):
        return self.ranks

    async def get_kv_cache_events_async(self, timeout):
        while not self.events.empty():
            yield self.events.get()


def follow(engine):
    """Passes the events of standard input to the engine until it ends."""
    numbers = [itertools.count() for _ in range(engine.ranks)]
    for line in sys.stdin:
        for event in json.loads(line):
            event["event_id"] = next(numbers[event["attention_dp_rank"]])
            engine.events.put(event)


async def answer(request):
    yield {}


async def main(ranks, block_size, where):
    endpoint, worker, zmq = None, 0, f"tcp://127.0.0.1:{where}"
    if where == "plane":
        endpoint = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq").endpoint("trt.backend.generate")
        worker, zmq = int(endpoint.connection_id()), None
    engine = Engine(int(ranks))
    async with get_publisher(endpoint, engine, worker, int(block_size), [], None, zmq_endpoint=zmq, publish_metrics=False,
                             kv_event_publication_mode=KvEventPublicationMode.POLLING) as publisher:
        if endpoint is not None:
            serving = asyncio.ensure_future(endpoint.serve_endpoint(answer))  # noqa: F841: the reference keeps it alive
        publisher.start()
        print("ready", worker, flush=True)
        await asyncio.to_thread(follow, engine)


asyncio.run(main(*sys.argv[1:]))
