"""Code that the comparisons of this folder share: engines as processes, medians, goals."""

import json
import os
import re
import statistics
import subprocess
import sys


class Engine:
    """A process that reads commands, one a line, and answers each with a line of JSON."""

    def __init__(self, command, cores=1):
        self.command = command
        # Drop settings of Go's garbage collector from the environment.
        environment = {k: v for k, v in os.environ.items() if k not in ("GOGC", "GOMEMLIMIT", "GODEBUG")}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment | {"GOMAXPROCS": str(cores)})

    def send(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("%s ended" % " ".join(self.command))
        return json.loads(line)

    def ask(self, command):
        self.send(command)
        return self.read()

    def close(self):
        self.process.stdin.close()
        if self.process.wait() != 0:
            sys.exit("%s failed" % " ".join(self.command))


def once(command, request, cores=1):
    """Starts a process for one command, and returns its answer."""
    engine = Engine(command, cores)
    answer = engine.ask(request)
    engine.close()
    return answer


def turns(items, round):
    """The items in rotated order: each round begins with another one."""
    first = round % len(items)
    return items[first:] + items[:first]


def median(values):
    return statistics.median(values)


def goal(text, value, limit, at_least=False):
    good = value >= limit if at_least else value <= limit
    return "%s %.3g (goal: %s %g) %s" % (text, value, "at least" if at_least else "at most", limit, "met" if good else "NOT MET")


charts = {}


def bar(title, name, value, x="CPU time of the others, in multiples of kvepp's: more is better for kvepp"):
    """Adds a bar to the chart of this title."""
    charts.setdefault(title, {"title": title, "x": x, "bars": []})["bars"].append({"name": name, "value": value})


def draw(part):
    """Draws all charts into the folder OUT, with the program KVEPP_CHARTS that the scripts build. Without it, draws nothing."""
    program, out = os.environ.get("KVEPP_CHARTS"), os.environ.get("OUT")
    if not program or not out:
        return
    lines = [json.dumps(dict(chart, file=part + "-" + re.sub("[^a-z0-9]+", "-", title.lower()).strip("-"))) for title, chart in charts.items()]
    sys.stdout.flush()
    subprocess.run([program, "-out", out], input="\n".join(lines), text=True, check=True)
