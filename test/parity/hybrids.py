"""Says which models SGLang keeps in more than full attention's blocks, by SGLang's own code.

    hybrids.py SOURCES

SOURCES holds the engine's package. Prints {"config": ..., "hybrid": ...} for configurations of every architecture in SGLang's models and
of every model type in its configurations, alone and as the text part of another.

SGLang's decisions run as they are: is_hybrid_swa_model out of configs/model_config.py, and configs/hybrid_arch.py. They ask for classes of
configurations; these are stood in for by empty classes of the same names, bases and model types, which hold the values of a config.json.
"""

import ast
import glob
import json
import sys
import types

root = sys.argv[1] + "/sglang/srt/"


def parse(path):
    with open(root + path) as file:
        return ast.parse(file.read())


def run(path, wanted):
    """Runs the definitions of these names in a module, and returns them."""
    nodes = []
    for node in parse(path).body:
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else \
            [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
        if set(names) & set(wanted):
            nodes.append(node)
    space = {}
    exec("from __future__ import annotations\nfrom typing import *\nPretrainedConfig = object", space)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + nodes, []), path, "exec"), space)
    missing = set(wanted) - set(space)
    assert not missing, f"{path} has no {missing}: SGLang has changed, look where it decides now"
    return space


class Config:
    """A config.json: what it does not say is None."""

    model_type = None

    def __init__(self, **values):
        vars(self).update(values)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def get_text_config(self):
        for part in ("thinker_config", "llm_config", "language_config", "text_config"):
            if part in vars(self):
                inner = getattr(self, part)
                return inner.text_config if part == "thinker_config" and inner.text_config else inner
        return self

    # Of two classes, SGLang asks a property made of other values.
    @property
    def use_kda(self):
        return self.short_conv_kernel_size is not None

    @property
    def has_lightning_layers(self):
        return "lightning-attn" in (self.mixer_types or [])


# The classes of configurations. Where a class of Transformers gives the model type, it is that of the file.
from_transformers = {"Lfm2Config": "lfm2", "Lfm2VlConfig": "lfm2_vl"}
found = {}
registered = []
for path in sorted(glob.glob(root + "configs/*.py")):
    for node in ast.walk(parse(path[len(root):])):
        if isinstance(node, ast.ClassDef):
            model_type = from_transformers.get(node.name)
            for statement in node.body:
                target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
                if isinstance(target, ast.Name) and target.id == "model_type" and isinstance(statement.value, ast.Constant):
                    model_type = statement.value.value
            found[node.name] = [b.id for b in node.bases if isinstance(b, ast.Name)], model_type
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LinearAttnModelSpec":
            values = {k.arg: k.value for k in node.keywords}
            registered.append((values["config_class"].id, ast.literal_eval(values["arch_names"])))
made = {}


def make(name):
    if name not in made:
        bases, model_type = found[name]
        parents = tuple(dict.fromkeys(make(b) for b in bases if b in found)) or (Config,)
        made[name] = type(name, parents, {"model_type": model_type} if model_type else {})
    return made[name]


for name in found:
    make(name)
stands = types.ModuleType("sglang.srt.configs")
vars(stands).update(made)
common = types.ModuleType("sglang.srt.utils.hf_transformers.common")
common.get_hf_text_config = lambda config: config.get_text_config()
for module in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.utils.hf_transformers"):
    sys.modules[module] = types.ModuleType(module)
sys.modules["sglang.srt.configs"], sys.modules["sglang.srt.utils.hf_transformers.common"] = stands, common
hybrid_arch = {}
exec(compile(parse("configs/hybrid_arch.py"), "hybrid_arch.py", "exec"), hybrid_arch)

is_hybrid_swa_model = run("configs/model_config.py", ["is_hybrid_swa_model", "SWA_SINK_ARCHS", "MIMO_V2_MODEL_ARCHS"])["is_hybrid_swa_model"]
stateful = run("arg_groups/overrides.py", ["_MAMBA_RADIX_CACHE_ARCHS"])["_MAMBA_RADIX_CACHE_ARCHS"]
by_type = {}
for name, cls in made.items():
    if cls.model_type is not None and "Vision" not in name and "Audio" not in name:  # these share the whole's model type
        by_type.setdefault(cls.model_type, cls)


def load(config):
    """The configuration as SGLang's classes would hold it."""
    values = {k: load(v) if isinstance(v, dict) else v for k, v in config.items()}
    return by_type.get(config.get("model_type"), Config)(**values)


def decide(config):
    loaded = load(config)
    architectures = config.get("architectures", [])
    if is_hybrid_swa_model(architectures, loaded.get_text_config()):
        return True
    if any(a in stateful or any(a in names for _, names in registered) for a in architectures):
        return True
    linear = next(((spec, loaded) for spec, _ in registered if isinstance(loaded, made[spec])), None)
    model = types.SimpleNamespace(hf_config=loaded, is_draft_model=False, linear_attn_registry_result=linear)
    return hybrid_arch["mambaish_config"](model) is not None


def tell(config):
    print(json.dumps({"config": config, "hybrid": decide(config)}))


architectures = {"LagunaForCausalLM"} | stateful | {a for _, names in registered for a in names}
for path in glob.glob(root + "models/**/*.py", recursive=True):
    for node in parse(path[len(root):]).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets):
            architectures |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
for function in parse("configs/model_config.py").body:  # drafts have names that no model's class has
    if isinstance(function, ast.FunctionDef) and function.name == "is_hybrid_swa_model":
        architectures |= {n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier()}
for name in sorted(architectures):
    tell({"architectures": [name]})
tell({"architectures": ["LagunaForCausalLM"], "sliding_window": 512})
tell({"architectures": ["LagunaForCausalLM"], "text_config": {"sliding_window": 512}})
for name in sorted(by_type) + ["glm5_next", "llama", "gemma3_text"]:
    layers = {"layer_types": ["attention", "mamba"], "mixer_types": ["minicpm4", "lightning-attn"]}
    inner = {}  # the parts that SGLang takes for granted in these
    if name.startswith("NemotronH_Nano") or name == "nemotron_h_omni":
        inner = {"llm_config": {"model_type": "nemotron_h"}}
    elif name.startswith("inkling"):
        inner = {"mamba2_cache_params": {}, "text_config": {"mamba2_cache_params": {}}}
    tell({"model_type": name, **layers, **inner})
    tell({"model_type": name, "layer_types": ["attention"], "mixer_types": ["minicpm4"], **inner})
    tell({"model_type": name, "short_conv_kernel_size": 4, **layers, **inner})
    tell({"model_type": "another", "text_config": {"model_type": name, "short_conv_kernel_size": 4, **layers}})
    tell({"model_type": "another", "thinker_config": {"model_type": "inner", "text_config": {"model_type": name, **layers}}})
tell({"architectures": ["Custom"], "is_hybrid_swa": True})
tell({"architectures": ["Custom"], "text_config": {"is_hybrid_swa": True}})
