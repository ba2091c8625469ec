"""Which repositories ``videokv run`` knows: their script, its arguments and their model.

Read off the repositories' scripts; a table of names, no code of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# What a script can take. prompts: a file of one prompt a line; prompt: one. video: a file to write,
# out: a folder. frames: latent frames; video_frames: those of the decoded video, 4 a latent frame
# after the first; chunks: of 4 latent frames.
KINDS = (
    *("checkpoint", "config", "prompts", "prompt", "out", "video", "seed"),
    *("frames", "video_frames", "chunks"),
)


@dataclass(frozen=True)
class Checkout:
    """How a repository is run.

    module, cls: where its model is. entry: its script. config: its usual one. takes: what the
    script takes (``KINDS``) and the name of the argument. edits: what stands in the config
    instead, and under which key; a copy of the config is changed. needs: options that must be
    given. fixed: arguments that are always there. hint: what to give after ``--``. method, marks:
    which call of the model says that its cache is in use: one of these arguments is not None or
    False. folder: whether the checkpoint is a folder, which holds what ``hint`` says; None: either.
    launched: whether the script expects the environment of ``torchrun``.
    """

    module: str
    cls: str
    entry: str
    config: str | None = None
    takes: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    hint: str = ""
    method: str = "forward"
    marks: tuple[str, ...] = ("kv_cache",)
    folder: bool | None = None
    launched: bool = False

    def __post_init__(self) -> None:
        if unknown := {*self.takes, *self.edits} - set(KINDS):
            raise ValueError(f"{self.entry}: unknown kinds {sorted(unknown)}; known: {KINDS}")


WAN_MODULE = "wan.modules.causal_model"
WAN = {
    "config": "--config_path",
    "checkpoint": "--checkpoint_path",
    "prompts": "--data_path",
    "out": "--output_folder",
    "frames": "--num_output_frames",
    "seed": "--seed",
}
NEEDS = ("checkpoint", "prompt")


def _wan(config: str) -> Checkout:
    return Checkout(WAN_MODULE, "CausalWanModel", "inference.py", config, WAN, needs=NEEDS)


CHECKOUTS = {
    "self-forcing": _wan("configs/self_forcing_dmd.yaml"),
    "causal-forcing": _wan("configs/causal_forcing_dmd_chunkwise.yaml"),
    "rolling-forcing": _wan("configs/rolling_forcing_dmd.yaml"),
    "causvid": Checkout(
        "causvid.models.wan.causal_model",
        "CausalWanModel",
        "minimal_inference/autoregressive_inference.py",
        "configs/wan_causal_dmd.yaml",
        {
            "config": "--config_path",
            "checkpoint": "--checkpoint_folder",
            "out": "--output_folder",
            "prompts": "--prompt_file_path",
        },
        needs=NEEDS,
        folder=True,
        hint="the checkpoint is the folder that holds model.pt",
    ),
    "longlive-v1": Checkout(
        WAN_MODULE,
        "CausalWanModel",
        "inference.py",
        "configs/longlive_inference.yaml",
        {"config": "--config_path"},
        {
            "checkpoint": "generator_ckpt",
            "prompts": "data_path",
            "out": "output_folder",
            "frames": "num_output_frames",
            "seed": "seed",
        },
        needs=NEEDS,
        hint="the path of its LoRA is lora_ckpt of the config",
    ),
    "longlive": Checkout(
        "wan_5b.modules.causal_model",
        "CausalWanModel",
        "inference.py",
        "configs/inference.yaml",
        {"config": "--config_path"},
        {
            "checkpoint": "generator_ckpt",
            "out": "output_folder",
            "frames": "num_output_frames",
            "seed": "seed",
        },
        needs=("checkpoint", "config"),
        hint="prompts and LoRA are data_path and lora_ckpt of the config",
    ),
    "matrix-game-2": Checkout(
        WAN_MODULE,
        "CausalWanModel",
        "inference.py",
        "configs/inference_yaml/inference_universal.yaml",
        {key: name for key, name in WAN.items() if key != "prompts"},
        needs=("checkpoint",),
        hint="it starts from an image: -- --img_path FILE --pretrained_model_path FOLDER",
    ),
    "lingbot-world-2": Checkout(
        "wan.modules.model_fast",
        "WanModelFast",
        "generate.py",
        takes={
            "checkpoint": "--ckpt_dir",
            "prompt": "--prompt",
            "video": "--save_file",
            "video_frames": "--frame_num",
            "seed": "--base_seed",
        },
        needs=NEEDS,
        folder=True,
        hint="it starts from an image: -- --image FILE --action_path FOLDER",
    ),
    "krea": Checkout(
        WAN_MODULE,
        "CausalWanModel",
        "sample.py",
        hint="its script holds prompts and sizes, its configs folder the weights",
    ),
    "longcat-video": Checkout(
        "longcat_video.modules.longcat_video_dit",
        "LongCatVideoTransformer3DModel",
        "run_demo_long_video.py",
        takes={"checkpoint": "--checkpoint_dir"},
        needs=("checkpoint",),
        marks=("return_kv", "kv_cache_dict"),
        folder=True,
        launched=True,
        hint="its script holds the prompt; the checkpoint is the folder of weights",
    ),
    "hy-worldplay": Checkout(
        "hyvideo.models.transformers.worldplay_1_5_transformer",
        "HunyuanVideo_1_5_DiffusionTransformer",
        "hyvideo/generate.py",
        takes={
            "checkpoint": "--action_ckpt",
            "prompt": "--prompt",
            "out": "--output_path",
            "video_frames": "--video_length",
            "seed": "--seed",
        },
        needs=NEEDS,
        fixed=("--model_type", "ar"),
        method="forward_vision",
        hint="and after --: --model_path FOLDER --image_path FILE --pose w-31",
    ),
    "hy-worldplay-wan": Checkout(
        "wan.models.dits.arwan_w_action_w_mem_relative_rope",
        "WanTransformer3DModel",
        "wan/generate.py",
        takes={
            "checkpoint": "--ckpt_path",
            "prompt": "--input",
            "out": "--out",
            "chunks": "--num_chunk",
        },
        needs=NEEDS,
        launched=True,
        hint="and after --: --image_path FILE --ar_model_path FOLDER --pose w-96",
    ),
    "magi-1": Checkout(
        "inference.model.dit.dit_model",
        "VideoDiTModel",
        "inference/pipeline/entry.py",
        takes={"config": "--config_file", "prompt": "--prompt", "video": "--output_path"},
        needs=("config", "prompt"),
        fixed=("--mode", "t2v"),
        marks=("inference_params",),
        launched=True,
        hint="weights, seed and frames are in its config file",
    ),
}
IN_PYTHON = {
    "lingbot-world": "lingbot-world.md",
    "anyflow-far": "anyflow-far.md",
    "sana-wm-refiner": "sana-wm-refiner.md",
    "skyreels-v2": "skyreels-v2.md",
    "transformers": "transformers.md",
}


def edited(config: str, values: Mapping[str, str]) -> str:
    """The text of a YAML config with other values of some keys, wherever they stand.

    Raises:
        ValueError: a key stands there twice.
    """
    for key, value in values.items():
        pattern = re.compile(rf"^(\s*{re.escape(key)}:)[^\n]*$", re.MULTILINE)
        found = list(pattern.finditer(config))
        if len(found) > 1:
            raise ValueError(f"the config has {key} {len(found)} times; set it there by hand")
        if found:
            (match,) = found
            config = f"{config[: match.start()]}{match[1]} {value}{config[match.end() :]}"
        else:
            config = f"{config.rstrip()}\n{key}: {value}\n"
    return config
