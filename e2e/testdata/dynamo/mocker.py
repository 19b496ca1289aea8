"""Runs Dynamo's mocker with further keys in the runtime_config of its model card: mocker.py JSON FLAGS..."""

import json
import sys

from dynamo.mocker import main as mocker

settings = json.loads(sys.argv.pop(1))
build = mocker.build_runtime_config


def build_runtime_config(engine_args):
    block_size, config = build(engine_args)
    for name, value in settings.items():
        if name == "runtime_data":
            for key, datum in value.items():
                config.set_engine_specific(key, json.dumps(datum))
        else:
            setattr(config, name, value)
    return block_size, config


mocker.build_runtime_config = build_runtime_config
mocker.main()
