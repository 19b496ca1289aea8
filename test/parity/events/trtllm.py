"""Publishes KV events with the Publisher of Dynamo's TensorRT-LLM worker, which polls an engine for them.

    trtllm.py RANKS BLOCK_SIZE ZMQ_PORT    over the publisher's own ZMQ socket, as for Dynamo's consolidator
    trtllm.py RANKS BLOCK_SIZE plane       over Dynamo's event plane, as endpoint trt.backend.generate of its discovery

The engine is stood in for: it has the events that standard input says, in TensorRT-LLM's own form, a JSON array of them in each line,
of which this numbers each rank's. Prints "ready ID", with Dynamo's id of the worker.
"""

import asyncio
import itertools
import json
import queue
import sys
import types

# dynamo.trtllm.publisher imports it, for metrics that are not published here.
sys.modules["prometheus_client"] = types.SimpleNamespace(CollectorRegistry=object)

from dynamo.runtime import DistributedRuntime  # noqa: E402
from dynamo.trtllm.publisher import KvEventPublicationMode, get_publisher  # noqa: E402


class Engine:
    """As much of dynamo.trtllm's engine, and of the LLM in it, as has to do with events."""

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
    """Gives the engine the events of standard input, until it ends."""
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
            serving = asyncio.ensure_future(endpoint.serve_endpoint(answer))  # noqa: F841: it lives as long as its name
        publisher.start()
        print("ready", worker, flush=True)
        await asyncio.to_thread(follow, engine)


asyncio.run(main(*sys.argv[1:]))
