"""Prints goldens.json: KV event batches as the engines encode them, with their expected decoding.

The classes have the same fields, order and options as the engines' classes, so that msgspec (0.22.0) produces the
engines' bytes. The expected decoding of each batch is written by hand.

    python goldens.py >goldens.json
"""

import json
from typing import Any, Optional, Union

import msgspec

goldens = []


def batch(array_like=True, rank="data_parallel_rank", omit_defaults=True):
    fields = [("ts", float), ("events", list)]
    if rank:
        fields.append((rank, Optional[int], None))
    return msgspec.defstruct("EventBatch", fields, array_like=array_like, omit_defaults=omit_defaults)


def event(name, fields, array_like):
    types = {"block_hashes": list, "token_ids": list, "block_size": int}
    return msgspec.defstruct(
        name,
        [(f, types.get(f, Any)) if f in types or not f.endswith("?") else (f[:-1], Any, None) for f in fields.split()],
        array_like=array_like, omit_defaults=True, tag=True,
    )


def golden(name, batch, meaning):
    goldens.append({"name": name, "hex": msgspec.msgpack.encode(batch).hex(), **meaning})


def stored(hashes, tokens, block_size, **more):
    return {"kind": "BlockStored", "hashes": [str(h % 2**64) for h in hashes], "tokens": tokens, "block_size": block_size, **more}


def removed(hashes, **more):
    return {"kind": "BlockRemoved", "hashes": [str(h % 2**64) for h in hashes], **more}


cleared = {"kind": "AllBlocksCleared"}
tokens = [1, 2, 127, 128, 255, 256, 65535, 65536]
digests = [bytes(range(32)), bytes(range(32, 64))]
folded = [int.from_bytes(d[-8:], "big") for d in digests]
big = [2**63 + 5, 7]

# vLLM: events are positional until 0.25; later versions add fields at the end.
trail = "group_idx? kv_cache_spec_kind? kv_cache_spec_sliding_window?"
versions = {
    "vLLM 0.11": ("block_hashes parent_block_hash token_ids block_size lora_id medium", "block_hashes medium", True),
    "vLLM with names of adapters": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name", "block_hashes medium", True),
    "vLLM 0.19": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys?", "block_hashes medium", True),
    "vLLM with groups": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys? " + trail,
                         "block_hashes medium group_idx?", True),
    "vLLM with locality": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys? " + trail + " locality?",
                           "block_hashes medium group_idx? locality?", True),
    "vLLM with ownership": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys? " + trail + " locality? ownership?",
                            "block_hashes medium group_idx? locality? ownership?", True),
    "vLLM 0.26": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys? " + trail + " locality?",
                  "block_hashes medium group_idx? locality?", False),
    "vLLM 0.31": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys? " + trail + " locality? ownership? session_id?",
                  "block_hashes medium group_idx? locality? ownership?", False),
    "vLLM 0.33": ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys? " + trail
                  + " locality? ownership? session_id? lookahead_token_ids?",
                  "block_hashes medium group_idx? locality? ownership?", False),
}
for name, (store, remove, array_like) in versions.items():
    Batch = batch()
    Stored, Removed, Cleared = event("BlockStored", store, array_like), event("BlockRemoved", remove, array_like), event("AllBlocksCleared", "", array_like)
    fields = store.replace("?", "").split()

    def make(**values):
        # msgspec requires the fields without a default, and not every version has every field.
        values = {"parent_block_hash": None, "lora_id": None, "medium": "GPU", "lora_name": None, **values}
        return Stored(**{k: v for k, v in values.items() if k in fields})

    golden(name + ", a prompt's beginning", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4)], 0),
           {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU")]})
    golden(name + ", digests", Batch(1.5, [make(block_hashes=digests[1:], parent_block_hash=digests[0], token_ids=tokens, block_size=8),
                                          Removed(block_hashes=digests, medium="GPU"), Cleared()], 3),
           {"rank": 3, "events": [stored(folded[1:], tokens, 8, parent=str(folded[0]), medium="GPU"), removed(folded, medium="GPU"), cleared]})
    if "lora_name" in fields:
        meant = {"lora_name": "sql"} | ({"extra_keys": msgspec.msgpack.encode([("sql",), ("sql",)]).hex()} if "extra_keys" in fields else {})
        golden(name + ", adapter", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, lora_id=1, lora_name="sql",
                                                   extra_keys=[("sql",), ("sql",)], medium="CPU")], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="CPU", lora_id=True, **meant)]})
    else:
        golden(name + ", adapter", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, lora_id=1)], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU", lora_id=True)]})
    if "extra_keys" in fields:
        keys = [("sql", ("ab" * 32, -3), "tenant-a", bytes(32)), ("sql",)]
        golden(name + ", adapter, image, salt and embeddings",
               Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, lora_name="sql", extra_keys=keys)], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU", lora_name="sql", extra_keys=msgspec.msgpack.encode(keys).hex())]})
    if "group_idx" in fields:
        golden(name + ", a sliding window's group",
               Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, group_idx=1, kv_cache_spec_kind="sliding_window",
                                kv_cache_spec_sliding_window=1024),
                           Removed(block_hashes=[7], medium=None, group_idx=1)], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU", group=1, spec_kind="sliding_window"), removed([7], group=1)]})
    if "locality" in fields:
        golden(name + ", stored elsewhere", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, medium="STORAGE", locality="REMOTE"),
                                                       Removed(block_hashes=[7], medium="STORAGE", locality="REMOTE")], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="STORAGE", locality="REMOTE"), removed([7], medium="STORAGE", locality="REMOTE")]})
    if "ownership" in fields:
        golden(name + ", owned by another", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, ownership="kvcr"),
                                                       Removed(block_hashes=[7], medium="GPU", ownership="kvcr")], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU", ownership="kvcr"), removed([7], medium="GPU", ownership="kvcr")]})
    if "session_id" in fields:
        golden(name + ", session", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, session_id="s")], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU")]})
    if "lookahead_token_ids" in fields:
        golden(name + ", lookahead", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, lookahead_token_ids=[[255], [9]])], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU", lookahead=[9])]})
        golden(name + ", short lookahead", Batch(1.5, [make(block_hashes=big, token_ids=tokens, block_size=4, lookahead_token_ids=[[255, 256], [9, 8]])], 0),
               {"rank": 0, "events": [stored(big, tokens, 4, medium="GPU", lookahead=[9, 8])]})

golden("vLLM, a batch as map", batch(array_like=False)(1.5, [event("AllBlocksCleared", "", False)()], 1), {"rank": 1, "events": [cleared]})
golden("vLLM, a batch without a rank", batch()(1.5, []), {"events": []})

# SGLang: first without a rank, then with a salt instead of an adapter, then as maps.
signed = [-(2**63), -1, 12]
pairs = [[1, 2], [2, 3], [3, 4], [4, 5]]
Stored, Removed, Cleared = (event(n, f, True) for n, f in (
    ("BlockStored", "block_hashes parent_block_hash token_ids block_size lora_id"), ("BlockRemoved", "block_hashes"), ("AllBlocksCleared", "")))
golden("SGLang, first", batch(rank=None)(1.5, [Stored(signed[:2], signed[2], tokens, 4, None), Removed(signed), Cleared()]),
       {"events": [stored(signed[:2], tokens, 4, parent="12"), removed(signed), cleared]})
Stored, Removed = event("BlockStored", "block_hashes parent_block_hash token_ids block_size lora_id medium metadata", True), event("BlockRemoved", "block_hashes medium", True)
golden("SGLang, salted", batch(rank="attn_dp_rank")(1.5, [Stored(signed[:2], None, tokens, 4, None, "GPU", {"cache_salt": "tenant-a"}), Removed(signed, "CPU_PINNED")], 2),
       {"rank": 2, "events": [stored(signed[:2], tokens, 4, medium="GPU", cache_salt="tenant-a"), removed(signed, medium="CPU_PINNED")]})
golden("SGLang, pairs", batch(rank="attn_dp_rank")(1.5, [Stored(signed[:1], None, pairs, 4, None, "GPU", None)], 0),
       {"rank": 0, "events": [stored(signed[:1], [1, 2, 3, 4, 5], 4, medium="GPU", bigram=True)]})
Stored, Removed, Cleared = (event(n, f, False) for n, f in (
    ("BlockStored", "block_hashes parent_block_hash token_ids block_size lora_id medium? cache_salt? session_id?"),
    ("BlockRemoved", "block_hashes medium?"), ("AllBlocksCleared", "")))
golden("SGLang 0.5.21", batch(rank="attn_dp_rank", omit_defaults=False)(1.5, [
    Stored(signed[:2], signed[2], tokens, 4, None, "DISK", "tenant-a", "s"), Stored(signed[:1], None, pairs, 4, None),
    Removed(signed, "EXTERNAL"), Cleared()], 1),
       {"rank": 1, "events": [stored(signed[:2], tokens, 4, parent="12", medium="DISK", cache_salt="tenant-a"),
                              stored(signed[:1], [1, 2, 3, 4, 5], 4, bigram=True), removed(signed, medium="EXTERNAL"), cleared]})

# TensorRT-LLM's own publisher: first without adapters, then with adapter numbers and media keys; a medium's token is a digest.
Stored = event("BlockStored", "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys? group_idx? kv_cache_spec_kind? "
               "kv_cache_spec_sliding_window? locality? mm_keys?", False)
Removed, Cleared = event("BlockRemoved", "block_hashes medium group_idx? locality?", False), event("AllBlocksCleared", "", False)
Key = msgspec.defstruct("MultimodalKey", [("hash", str), ("start_offset", int), ("uuid", Optional[str], None)], omit_defaults=True, tag="mm_key")
golden("TensorRT-LLM's own", batch()(1.5, [Stored(signed[:2], None, tokens, 4, None, "GPU", None), Removed(signed, "GPU"), Cleared()], 0),
       {"rank": 0, "events": [stored(signed[:2], tokens, 4, medium="GPU"), removed(signed, medium="GPU"), cleared]})
golden("TensorRT-LLM's own, an adapter", batch()(1.5, [Stored(signed[:2], 12, tokens, 4, 3, "GPU", None)], 1),
       {"rank": 1, "events": [stored(signed[:2], tokens, 4, parent="12", medium="GPU", lora_id=True)]})
digest = "c0ffee" * 10 + "c0ff"
golden("TensorRT-LLM's own, an image", batch()(1.5, [Stored(signed[:2], None, tokens, 4, None, "GPU", None, mm_keys=[[], [Key(digest, 0, "u"), Key(digest, 9)]]),
                                                     Stored(signed[:2], None, tokens[:6] + [digest, 7], 4, None, "GPU", None),
                                                     Stored(signed[:2], None, tokens, 4, None, "GPU", None, mm_keys=[[], []])], 0),
       {"rank": 0, "events": [stored(signed[:2], tokens, 4, medium="GPU", media=1), stored(signed[:2], tokens[:6], 4, medium="GPU", media=-1),
                              stored(signed[:2], tokens, 4, medium="GPU")]})

# Dynamo's worker for TensorRT-LLM and its mocker send plain maps; newer Dynamo workers omit the tokens.
golden("TensorRT-LLM", [1.5, [{"type": "BlockStored", "block_hashes": signed, "parent_block_hash": None, "token_ids": tokens[:3], "block_size": 1, "lora_id": 0,
                               "medium": None, "lora_name": "sql", "cache_salt": "tenant-a", "block_mm_infos": [None, None, None]}], 0],
       {"rank": 0, "events": [stored(signed, tokens[:3], 1, lora_name="sql", cache_salt="tenant-a")]})
golden("TensorRT-LLM, an image", [1.5, [{"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": tokens, "block_size": 8,
                                         "block_mm_infos": [{"mm_objects": [{"mm_hash": 7, "offsets": [[0, 2]]}]}]}], 0],
       {"rank": 0, "events": [stored([5], tokens, 8, media=0)]})
golden("TensorRT-LLM, hashed", [1.5, [{"type": "BlockStored", "block_hashes": signed[:2], "parent_block_hash": -7, "tokens_hashes": [-1, 3], "block_size": 32}], 0],
       {"rank": 0, "events": [stored(signed[:2], None, 32, parent=str(2**64 - 7), local=[str(2**64 - 1), "3"])]})

# Unknown events and fields.
golden("unknown", [1.5, [{"type": "BlockMoved", "x": [1, {"a": b"b"}]}, ["BlockMoved", 1.25], {"type": "AllBlocksCleared", "new": msgspec.msgpack.Ext(5, b"x")}], 0, "more"],
       {"rank": 0, "events": [cleared], "unknown_tags": 2, "unknown_keys": 2})

print("[\n" + ",\n".join(json.dumps(g) for g in goldens) + "\n]")
