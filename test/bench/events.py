"""Measures the CPU time of KV events and decisions in kvepp and in comparable programs, in one run.

An engine (bench-events, or index-rs for Dynamo's crate) answers these commands:

  receive MODE ENDPOINT KIND COUNT   CPU time of receiving COUNT messages with package zmqsub (zmqsub), or with package feed, which
                                     applies them to an index (index)
  decode KIND                        CPU time of decoding, hashing and applying, without a socket
  hash BLOCK_SIZE                    CPU time of hashing a prompt of 8,192 tokens, and a digest of the hashes
  select WORKERS                     CPU time of a selection among WORKERS workers, for each worker
  decide BLOCK_SIZE                  kvepp only: CPU time of the parts of a whole decision among 64 workers

bench-events-binding receives with the unchanged Go binding of libzmq (binding): "receive ENDPOINT COUNT". Publishers are separate
processes. Engines take turns. If hashes differ, the comparison ends.
"""

import argparse
import subprocess
import sys

from report import Engine, bar, draw, goal, median, once, turns

KINDS = {"prefill16": 64, "prefill64": 16, "decode16": 40}  # number of blocks that a message announces
MODES = ("binding", "zmqsub", "index")
MESSAGES = {"binding": 40960, "zmqsub": 40960, "index": 8192}


def received(programs, mode, kind):
    count = str(MESSAGES[mode])
    publisher = subprocess.Popen([programs.go, "publish", kind, count], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    endpoint = publisher.stdout.readline().strip() or sys.exit("the publisher does not start")
    if mode == "binding":
        answer = once([programs.go + "-binding"], "receive %s %s" % (endpoint, count), cores=2)
    else:
        answer = once([programs.go, "engine"], "receive %s %s %s %s" % (mode, endpoint, kind, count), cores=2)
    publisher.stdin.close()
    if publisher.wait() != 0:
        sys.exit("the publisher failed")
    return answer


def wire(programs, rounds, met):
    print("\n%-12s%27s%10s%10s%34s%32s" % ("us of CPU", "a message: binding", "zmqsub", "ratio", "a block: from wire to index", "decode, hash, apply alone"))
    for kind in KINDS:
        took = {mode: [] for mode in MODES}
        steps = []
        for r in range(rounds):
            for mode in turns(list(MODES), r):
                took[mode].append(received(programs, mode, kind))
            steps.append(once([programs.go, "engine"], "decode " + kind))
        binding, zmqsub = (median(t["message_ns"] for t in took[mode]) for mode in ("binding", "zmqsub"))
        block = median(t["block_ns"] for t in took["index"])
        parts = [median(s[part] for s in steps) for part in ("decode_ns", "normalize_ns", "apply_ns")]
        print("%-12s%27.2f%10.2f%10.2f%34.3f%32s" % (
            kind, binding / 1e3, zmqsub / 1e3, binding / zmqsub, block / 1e3, "  ".join("%.3f" % (p / 1e3) for p in parts)))
        bar("CPU of receiving and hashing", "receive, %s: libzmq's Go binding" % kind, binding / zmqsub)
        sys.stdout.flush()
        if kind != "prefill64":
            met.append(goal("E2 %s, receive, times less CPU than the binding:" % kind, binding / zmqsub, 1.5, True))
        if kind == "prefill16":
            met.append(goal("E1 %s, wire to index, us a block:" % kind, block / 1e3, 0.3))
            met.append(goal("E1 %s, million blocks a second on one core:" % kind, 1e3 / block, 4, True))


def hashing(programs, rounds, met):
    print("\n%-44s%12s%12s%16s" % ("ns of CPU", "kvepp", "Dynamo", "Dynamo / kvepp"))
    engines = {"kvepp": Engine([programs.go, "engine"]), "Dynamo": Engine([programs.rs, "scheduling"])}
    ns = {}
    for size in 16, 64:
        took = {name: [] for name in engines}
        for r in range(3 * rounds):
            for name in turns(list(engines), r):
                took[name].append(engines[name].ask("hash %d" % size))
        if len({t["digest"] for all in took.values() for t in all}) != 1:
            sys.exit("block size %d: kvepp and Dynamo hash differently" % size)
        for label, what in ("hash a block of %d tokens" % size, "local_ns"), ("its step of the chain", "sequence_ns"):
            own, other = (median(t[what] for t in took[name]) for name in ("kvepp", "Dynamo"))
            ns[size, what] = own, other
            print("%-44s%12.2f%12.2f%16.2f" % (label, own, other, other / own))
            bar("CPU of receiving and hashing", (label if what == "local_ns" else label + " (%d tokens)" % size) + ": Dynamo", other / own)
        own, other = ns[size, "local_ns"]
        met.append(goal("E3 block of %d tokens, hash, times Dynamo's:" % size, own / other, 1))
    took = {name: [] for name in engines}
    for r in range(rounds):
        for name in turns(list(engines), r):
            took[name].append(engines[name].ask("select 1024")["select_ns"])
    own, other = (median(took[name]) for name in ("kvepp", "Dynamo"))
    bar("CPU of receiving and hashing", "choose among 1,024 workers: Dynamo", other / own)
    print("%-44s%12.2f%12.2f%16.2f" % ("choose among 1,024 workers, a worker", own, other, other / own))
    met.append(goal("S1 choose, ns a worker:", own, 4))
    sys.stdout.flush()
    few = median(engines["Dynamo"].ask("select 64")["select_ns"] for _ in range(rounds))
    print("\n%-52s%10s%10s%10s%10s" % ("us of CPU, a decision on 8,192 tokens, 64 workers", "hash", "find", "select", "all"))
    for size, limit in (64, 4), (16, 8):
        parts = [engines["kvepp"].ask("decide %d" % size) for _ in range(rounds)]
        each = [median(p[part] for p in parts) / 1e3 for part in ("hash_ns", "find_ns", "select_ns")]
        print("%-52s%10.2f%10.2f%10.2f%10.2f" % ("kvepp, block of %d tokens, booked" % size, *each, sum(each)))
        hash = 8192 / size * (ns[size, "local_ns"][1] + ns[size, "sequence_ns"][1]) / 1e3
        print("%-52s%10.2f%10s%10.2f" % ("Dynamo, from the above, not looked up and not booked", hash, "", 64 * few / 1e3))
        met.append(goal("S2 block of %d tokens, a whole decision, us:" % size, sum(each), limit))
    for engine in engines.values():
        engine.close()


def main():
    arguments = argparse.ArgumentParser(description="Measure KV events. test/bench/events.sh builds the programs and calls this.")
    arguments.add_argument("--go", required=True, help="the program bench-events")
    arguments.add_argument("--rs", required=True, help="the program index-rs")
    arguments.add_argument("--rounds", type=int, default=7)
    programs = arguments.parse_args()
    print("CPU time of the process, the kernel's and libzmq's part included, median of %d rounds in turns. A message of prefill16 or\n"
          "prefill64 announces a prompt of 1,024 tokens in blocks of 16 or 64; one of decode16 40 events of one block each." % programs.rounds)
    met = []
    wire(programs, programs.rounds, met)
    hashing(programs, programs.rounds, met)
    print("\nGoals")
    for line in met:
        print("  " + line)
    draw("events")


main()
