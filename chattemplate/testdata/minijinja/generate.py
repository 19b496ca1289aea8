"""Regenerates ../minijinja.json: the outputs of Dynamo's renderer for the templates in it and in ../jinja.json."""

import json
import pathlib
import subprocess

here = pathlib.Path(__file__).parent
golden = here.parent / "minijinja.json"
old = json.loads(golden.read_text())
templates = [case["template"] for case in json.loads((here.parent / "jinja.json").read_text())["cases"]]
templates += [case["template"] for case in old["cases"]]
templates = [t for t in dict.fromkeys(templates) if "big" not in t and "strftime" not in t]
variables = {name: value for name, value in old["vars"].items() if name != "messages"}
lines = [json.dumps({"template": t, "messages": old["vars"]["messages"], "variables": variables}) for t in templates]
run = subprocess.run([here / "target/release/oracle"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
cases = []
for template, line in zip(templates, run.stdout.split("\n")):
    answer = json.loads(line)
    if "text" in answer:
        cases.append({"template": template, "output": answer["text"]})
    else:
        cases.append({"template": template, "error": answer["error"].split(" (in ")[0]})
golden.write_text(json.dumps({"vars": old["vars"], "cases": cases}, ensure_ascii=False, indent=0) + "\n")
print(len(cases), "cases")
