"""Collects the distinct chat templates that Python packages contain.

    templates.py PACKAGES OUT

PACKAGES is a folder of wheels and source archives. Writes each template to OUT/HASH.jinja, where HASH are the first 12 digits of
its SHA-256, and to OUT/names.json {HASH: [name, ...]}, the names of its files or of the code that has or makes it. Templates are
files *.jinja about messages, texts in Python files that are one, and all that mistral-common's generator can make.
"""

import ast
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zipfile


def is_template(text):
    return "messages" in text and "{%" in text and "%}" in text and "for " in text


def texts_of(source):
    """The texts in a Python file that are templates."""
    if "{%" not in source or "messages" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_template(node.value):
            yield node.value


def compiles(text):
    """Whether Jinja2 reads the text as a template: a package has texts about templates, too."""
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text.replace("{% generation", "{% if 1").replace("{%- generation", "{%- if 1")
                                                                        .replace("endgeneration", "endif"))
    except jinja2.TemplateError:
        return False
    return True


def members(package):
    """Names and contents of a package's files that may hold templates."""
    if package.endswith(".whl"):
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                if name.endswith((".jinja", ".py")):
                    yield name, archive.read(name).decode("utf-8", "replace")
        return
    with tarfile.open(package) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".jinja"):
                yield member.name.partition("/")[2], archive.extractfile(member).read().decode("utf-8", "replace")


def mistral(package):
    """What the generator of a mistral-common makes of every configuration that it takes."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
        out = subprocess.run([sys.executable, __file__, "mistral"], env={**os.environ, "PYTHONPATH": folder}, check=True, stdout=subprocess.PIPE).stdout
    yield from json.loads(out)


def generated():
    from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    flags = [f.name for f in dataclasses.fields(TemplateConfig) if f.type in (bool, "bool")]
    efforts = "reasoning_effort_values" in {f.name for f in dataclasses.fields(TemplateConfig)}
    for version in TokenizerVersion:
        for values in itertools.product((False, True), repeat=len(flags)):
            given = {name: value for name, value in zip(flags, values)}
            for more in [{}, {"reasoning_effort_values": ("none", "high"), "reasoning_effort_default": "none"}][: 1 + efforts]:
                try:
                    text = build_chat_template(TemplateConfig(version=version, **given, **more))
                except ValueError:  # no such model
                    continue
                on = "-".join(name.removesuffix("_support") for name in flags if given[name])
                yield f"generator/{version.value}{on and '-' + on}{'-efforts' if more else ''}", text


def main(packages, out):
    names = {}
    for package in sorted(glob.glob(packages + "/*")):
        label = os.path.basename(package).replace(".tar.gz", "").split("-py3")[0]
        found = [(name, text) for name, content in members(package) for text in ([content] if name.endswith(".jinja") else texts_of(content))]
        if label.startswith("mistral_common"):
            found += mistral(package)
        for name, text in found:
            if not is_template(text) or not compiles(text):
                continue
            key = hashlib.sha256(text.encode()).hexdigest()[:12]
            names.setdefault(key, []).append(label + "/" + name)
            with open(os.path.join(out, key + ".jinja"), "w", encoding="utf-8", newline="") as file:
                file.write(text)
    with open(os.path.join(out, "names.json"), "w", encoding="utf-8") as file:
        json.dump({key: sorted(set(names[key])) for key in sorted(names)}, file, indent=0)


if sys.argv[1:] == ["mistral"]:
    print(json.dumps(list(generated())))
else:
    main(*sys.argv[1:])
