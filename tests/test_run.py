"""``videokv run`` on a made-up checkout whose script calls the fake of Self-Forcing."""

import contextlib
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from videokv import cli
from videokv.studies import checkout

MODEL = """
import sys
sys.path.insert(0, {tests!r})
import types
from fakes import self_forcing as fake
attention = fake.attention
class CausalWanModel(fake.CausalWanModel):
    pass
CausalWanModel.__module__ = "fake_self_forcing.wan.modules.causal_model"
"""
SCRIPT = """
import argparse, sys, torch
from pathlib import Path
from fakes import self_forcing as fake
from fakes.common import seeded
from wan.modules.causal_model import CausalWanModel
parser = argparse.ArgumentParser()
for name in ("config_path", "checkpoint_path", "data_path", "output_folder", "seed"):
    parser.add_argument("--" + name)
parser.add_argument("--use_ema", action="store_true")
args = parser.parse_args()
assert Path(args.config_path).is_file() and Path(args.checkpoint_path).is_file()
model = seeded(CausalWanModel(size=32))
if not args.use_ema:
    out = fake.rollout(model, model.new_cache(36), fake.noise())
    torch.save(out, Path(args.output_folder, "out.pt"))
print(Path(args.data_path).read_text())
"""


@pytest.fixture
def repo(tmp_path, monkeypatch):
    folder = tmp_path / "repo"
    (folder / "wan/modules").mkdir(parents=True)
    (folder / "configs").mkdir()
    (folder / "configs/self_forcing_dmd.yaml").write_text("{}")
    tests = str(Path(__file__).parent)
    (folder / "wan/modules/causal_model.py").write_text(MODEL.format(tests=tests))
    (folder / "inference.py").write_text(SCRIPT)
    (tmp_path / "weights.pt").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield folder
    for name in [n for n in sys.modules if n == "wan" or n.startswith("wan.")]:
        del sys.modules[name]


def command(*more, model="self-forcing", recipe="rtn-8bit"):
    usual = ["--model", model, "--repo", "repo", "--recipe", recipe, "--out", "videos"]
    return cli.main(["run", *usual, *more])


USUAL = ("--checkpoint", "weights.pt", "--prompt", "a cat\n walks", "--prompt", "b")


def test_runs_the_script_inside_compress(repo, capsys):
    before = (list(sys.path), list(sys.argv))
    assert command(*USUAL, "--seed", "3", "--json") == 0
    printed = capsys.readouterr().out
    prompts, _, figures = printed.partition("{")
    assert prompts.split("\n")[:2] == ["a cat walks", "b"]
    found = json.loads("{" + figures)
    assert found["bits_per_element"] == 9 and found["held_bytes"] < found["dense_bytes"]
    exact = torch.load("videos/out.pt")
    assert command(*USUAL, recipe="bf16") == 0
    assert not torch.equal(torch.load("videos/out.pt"), exact)
    assert "self-forcing, bf16: dense" in capsys.readouterr().out
    assert (sys.path, sys.argv) == before


def test_refusals_say_what_to_do(repo, capsys, monkeypatch):
    def refused(*more, **how):
        assert command(*more, **how) == cli.WRONG_USAGE
        return capsys.readouterr().err

    assert "unknown model 'sora'; with its own script videokv runs self-forcing" in refused(
        model="sora"
    )
    assert "is no checkout of causvid: it has no minimal_inference" in refused(model="causvid")
    assert "needs --checkpoint and --prompt" in refused()
    assert "nothing was compressed" in refused(*USUAL, "--", "--use_ema")
    assert "ended with 2" in refused(*USUAL, "--", "--wrong")
    assert "no such file" in refused("--checkpoint", "none.pt", "--prompt", "b").lower()
    assert "unknown recipe" in refused(*USUAL, recipe="rtm-2bit")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs an NVIDIA GPU" in refused(*USUAL)


def arguments(name, folder, **given):
    usual = {"checkpoint": folder, "prompts": ("a cat",), "out": folder / "out"}
    known = checkout.CHECKOUTS[name]
    options = checkout.RunOptions(**{**usual, **given})
    return checkout._arguments(known, folder, name, options)


@pytest.fixture
def folder(tmp_path):
    for known in checkout.CHECKOUTS.values():
        if known.config is not None:
            path = tmp_path / known.config
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("a:\n  data_path: x\n  generator_ckpt: y  # here\nseed: 0\n")
    return tmp_path


def test_arguments_of_each_script(folder):
    out = str(folder / "out")
    made = arguments("causvid", folder)
    assert made[:4] == [
        *("--config_path", str(folder / "configs/wan_causal_dmd.yaml")),
        *("--checkpoint_folder", str(folder)),
    ]
    assert arguments("lingbot-world-2", folder, frames=3, more=("--image", "i.png")) == [
        *("--ckpt_dir", str(folder), "--prompt", "a cat", "--save_file", f"{out}/video.mp4"),
        *("--frame_num", "9", "--image", "i.png"),
    ]
    assert arguments("hy-worldplay", folder, seed=2)[:4] == [
        *("--model_type", "ar", "--action_ckpt", str(folder)),
    ]
    assert arguments("hy-worldplay-wan", folder, frames=8)[-2:] == ["--num_chunk", "2"]
    assert arguments("longcat-video", folder, prompts=()) == ["--checkpoint_dir", str(folder)]
    config = folder / "configs/longlive_inference.yaml"
    assert arguments("magi-1", folder, checkpoint=None, config=config)[:4] == [
        *("--mode", "t2v", "--config_file", str(config)),
    ]
    assert arguments("krea", folder, checkpoint=None, prompts=()) == []
    made = arguments("longlive-v1", folder, seed=5, frames=30)
    assert made == ["--config_path", f"{out}/config.yaml"]
    assert Path(made[1]).read_text() == (
        f'a:\n  data_path: "{out}/prompts.txt"\n  generator_ckpt: "{folder}"\nseed: 5\n'
        f'output_folder: "{out}"\nnum_output_frames: 30\n'
    )


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("causvid", {"seed": 1}, "no option for seed.*the folder that holds model.pt"),
        ("causvid", {"checkpoint": Path("x.pt")}, "takes a folder as --checkpoint, got x.pt"),
        ("matrix-game-2", {}, "no option for prompt; leave out --prompt .*--img_path"),
        ("lingbot-world-2", {"prompts": ("a", "b")}, "takes one --prompt, got 2"),
        ("hy-worldplay-wan", {"frames": 6}, "chunks of 4 latent frames, got --frames 6"),
        ("magi-1", {"checkpoint": None}, "needs --config .weights, seed and frames are in its"),
        ("krea", {}, "no option for checkpoint, prompt"),
        ("longcat-video", {"prompts": (), "checkpoint": None}, "needs --checkpoint"),
    ],
)
def test_what_a_script_does_not_take_is_refused(folder, name, given, message):
    with pytest.raises(ValueError, match=message):
        arguments(name, folder, **given)


def test_models_without_a_script_name_the_documented_way(repo, capsys):
    for name in ("skyreels-v2", "transformers"):
        assert command(*USUAL, model=name) == cli.WRONG_USAGE
        assert f"videokv.compress(model, recipe), as docs/models/{name}.md" in " ".join(
            capsys.readouterr().err.split()
        )


class Caching:
    def forward(self, x, return_kv=False, **more):
        return return_kv or more.get("kv_cache_dict")


@pytest.mark.parametrize("call", [((1, True), {}), ((1,), {"kv_cache_dict": "d"})], ids=str)
def test_the_model_is_held_at_its_first_pass_with_a_cache(call, monkeypatch, tmp_path):
    """Also where the argument comes by position, and where a script expects torchrun."""
    monkeypatch.setitem(sys.modules, "held_model", types.SimpleNamespace(Caching=Caching))
    monkeypatch.setattr(checkout, "compress", lambda model, _: contextlib.nullcontext(model))
    monkeypatch.delenv("RANK", raising=False)
    known = checkout.Checkout(
        "held_model", "Caching", "run.py", marks=("return_kv", "kv_cache_dict"), launched=True
    )
    original, model = Caching.forward, Caching()
    with contextlib.ExitStack() as stack:
        with checkout._inside(known, tmp_path, tmp_path / "run.py", []):
            assert os.environ["RANK"] == "0"
        assert "RANK" not in os.environ
        held = checkout._hold_on_first_pass(known, checkout.recipe("rtn-8bit"), stack)
        assert not model.forward(1) and not held
        assert model.forward(*call[0], **call[1]) and held == [model]
        assert Caching.forward is original
    assert Caching.forward is original
