"""Writes the vectors of TestWindowVectors: what vLLM's own KV cache manager caches of prompts, for models without full
attention, and the events that it announces.

Run it with a Python that can import vLLM 0.33 (vllm.v1.core): window-vectors.py > vectors.jsonl
"""

import collections
import json
import os
import random
import sys

import msgspec
import torch
import vllm.v1.core.kv_cache_utils as utils
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

CHUNK = 256  # tokens of a step


def write(**line):
    print(json.dumps(line, separators=(",", ":")))


class Engine:
    def __init__(self, windows, block, blocks, retention, hash_name, seed, eagle):
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        hash_fn = get_hash_fn_by_name(hash_name)
        utils.init_none_hash(hash_fn)
        self.hasher = utils.get_request_block_hasher(block, hash_fn)
        groups = [
            KVCacheGroupSpec([f"layer{i}"], SlidingWindowSpec(block_size=block, num_kv_heads=1, head_size=1,
                                                              dtype=torch.float32, sliding_window=w),
                             is_eagle_group=eagle)
            for i, w in enumerate(windows)
        ]
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups,
                               prefix_cache_retention_interval=retention)
        self.cache = KVCacheManager(config, max_model_len=4096, scheduler_block_size=block, hash_block_size=block,
                                    enable_caching=True, use_eagle=eagle, enable_kv_cache_events=True)
        self.n = 0
        self.encoder = msgspec.msgpack.Encoder()

    def events(self):
        events = self.cache.take_events()
        if events:
            write(batch=self.encoder.encode(KVEventBatch(ts=0.0, events=events)).hex())

    def begin(self, prompt, salt, answer):
        self.n += 1
        request = Request(str(self.n), prompt, SamplingParams(max_tokens=answer), None, block_hasher=self.hasher,
                          cache_salt=salt)
        request.answer = answer
        return request

    def step(self, request, rng, reported):
        """Computes the next tokens of a request. Returns whether it has ended; None: there is no room."""
        hit, blocks, boundary = 0, None, 0
        if request.num_computed_tokens == 0:
            blocks, hit, boundary = self.cache.get_computed_blocks(request)
            request.shared_prefix_boundary = boundary
        n = min(request.num_tokens - request.num_computed_tokens - hit, CHUNK)
        if self.cache.allocate_slots(request, n, hit, blocks) is None:
            return None
        if request.num_computed_tokens == 0:
            reported(hit)
        request.num_computed_tokens += hit + n
        if request.num_computed_tokens == request.num_tokens:
            if len(request.output_token_ids) == request.answer:
                self.cache.free(request)
                return True
            request.append_output_token_ids(rng.randrange(1, 1000))
        return False


def case(name, windows, block=16, blocks=160, retention=0, hash_name="sha256", seed=None, eagle=False, together=1,
         salts=0.0, requests=60):
    rng = random.Random(name)
    engine = Engine(windows, block, blocks, retention, hash_name, seed, eagle)
    write(case=name, eagle=eagle, seed=seed or "")
    fresh = lambda n: [rng.randrange(1, 1000) for _ in range(n)]
    shared, past, running = [fresh(rng.randint(30, 500)) for _ in range(4)], [], []
    left = requests
    while left or running:
        while left and len(running) < together:
            left -= 1
            kind = rng.random()
            salt = rng.choice(["tenant-a", "Mandant ß"]) if rng.random() < salts else None
            if kind < 0.25 or not past:
                prompt = rng.choice(shared) + fresh(rng.randint(1, 200))
            elif kind < 0.55:
                prompt, salt = past[-1 - rng.randrange(min(len(past), 6))]
                prompt = prompt + fresh(rng.randint(1, 120))
            elif kind < 0.7:
                prompt, salt = past[-1 - rng.randrange(min(len(past), 12))]
            else:
                prompt, salt = past[-1 - rng.randrange(min(len(past), 12))]
                prompt = prompt[: rng.randint(1, len(prompt))] + fresh(rng.randint(0, 60))
            if len(prompt) > 1200:
                prompt = rng.choice(shared) + fresh(5)
            running.append([engine.begin(prompt, salt, rng.randint(1, 40)), salt])
        for item in list(running):
            request, salt = item

            def reported(hit):
                write(prompt=list(request.prompt_token_ids), salt=salt or "", cached=hit)

            ended = engine.step(request, rng, reported)
            if ended:
                running.remove(item)
                past.append((list(request.all_token_ids), salt))
            engine.events()


case("window", [128])
case("window of one block", [16], blocks=40)
case("retention of all", [128], retention=None, blocks=220)
case("retention of 256", [128], retention=256, blocks=220)
case("sha256_cbor and PYTHONHASHSEED", [200], hash_name="sha256_cbor", seed="1234")
case("PYTHONHASHSEED", [100], block=32, seed="0", blocks=90)
case("salts", [128], salts=0.8)
case("two windows", [64, 200], blocks=260)
case("EAGLE that drops a block", [128], eagle=True)
case("four at once", [128], together=4, blocks=260, requests=100)
