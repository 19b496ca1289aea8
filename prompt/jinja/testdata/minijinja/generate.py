"""Regenerates ../minijinja.json: the outputs of Dynamo's renderer for the templates in it, in ../jinja.json and ../semantics.json."""

import json
import pathlib
import subprocess

here = pathlib.Path(__file__).parent
golden = here.parent / "minijinja.json"
old = json.loads(golden.read_text())
semantics = json.loads((here.parent / "semantics.json").read_text())
templates = [case["template"] for case in json.loads((here.parent / "jinja.json").read_text())["cases"]]
templates += [case["template"] for case in semantics["cases"][:-700]]  # without the random ones
templates += [case["template"] for case in old["cases"]]
templates = [t for t in dict.fromkeys(templates) if "big" not in t and "strftime" not in t]
all_variables = {name: value for name, value in semantics["vars"].items() if name != "big"}
variables = {name: value for name, value in all_variables.items() if name != "messages"}
lines = [json.dumps({"template": t, "messages": all_variables["messages"], "variables": variables}) for t in templates]
run = subprocess.run([here / "target/release/oracle"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
cases = []
for template, line in zip(templates, run.stdout.split("\n")):
    answer = json.loads(line)
    if "text" in answer:
        cases.append({"template": template, "output": answer["text"]})
    else:
        cases.append({"template": template, "error": answer["error"].split(" (in ")[0]})
golden.write_text(json.dumps({"vars": all_variables, "cases": cases}, ensure_ascii=False, indent=0) + "\n")
print(len(cases), "cases")
