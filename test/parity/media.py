"""Says what token ids vLLM's own media processors make of a prompt's, with images in their places.

    media.py FOLDER ARCHITECTURE

FOLDER holds a tokenizer. Needs a whole vLLM and torchvision; nothing is fetched, and the model is a configuration without weights.
Reads a JSON line for each prompt, {"ids": [...], "images": 2}, and answers with the ids that the engine computes, a list.
"""

import json
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
# Without it, vLLM may load kernels of another CPU than this machine's, and die of an illegal instruction.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
         "vocab_size": 4000, "max_position_embeddings": 2048}


def llava(ids):
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
              "num_hidden_layers": 2, "image_size": 28, "patch_size": 14, "projection_dim": 16}
    config = {"model_type": "llava", "image_token_index": ids["<image>"], "vision_feature_layer": -2,
              "vision_feature_select_strategy": "default", "text_config": {"model_type": "llama", **SMALL}, "vision_config": vision}
    images = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    return config, images, {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
                            "image_token": "<image>", "num_additional_image_tokens": 1}


def qwen(ids):
    vision = {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 14,
              "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {"model_type": "qwen2_vl", "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
              "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
              "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "vision_config": vision, **SMALL}
    images = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12544, "patch_size": 14, "merge_size": 2,
              "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return config, images, {"processor_class": "Qwen2VLProcessor"}


MODELS = {"LlavaForConditionalGeneration": llava, "Qwen2VLForConditionalGeneration": qwen}


def main(source, architecture):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (pathlib.Path(folder) / name).write_bytes((pathlib.Path(source) / name).read_bytes())
        with open(os.path.join(source, "tokenizer.json"), encoding="utf-8") as file:
            ids = {token["content"]: token["id"] for token in json.load(file)["added_tokens"]}
        config, images, processor = MODELS[architecture](ids)
        for name, content in (("config", {"architectures": [architecture], **config}), ("preprocessor_config", {**images, **processor}),
                              ("processor_config", processor)):
            (pathlib.Path(folder) / (name + ".json")).write_text(json.dumps(content))
        answer(folder)


def answer(folder):
    from PIL import Image
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    processor = MULTIMODAL_REGISTRY.create_processor(ModelConfig(model=folder, tokenizer=folder, dtype="float32", max_model_len=1024))
    for line in sys.stdin:
        asked = json.loads(line)
        images = [Image.new("RGB", (60 + 28 * i, 60)) for i in range(asked["images"])]
        inputs = ProcessorInputs(asked["ids"], processor.info.parse_mm_data({"image": images}))
        print("ids", json.dumps(processor.apply(inputs, TimingContext(enabled=False))["prompt_token_ids"]), flush=True)


main(*sys.argv[1:])
