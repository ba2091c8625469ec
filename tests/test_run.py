"""``videokv run`` on a made-up checkout whose script calls the fake of Self-Forcing."""

import json
import sys
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
    assert "needs --checkpoint and at least one --prompt" in refused()
    assert "nothing was compressed" in refused(*USUAL, "--", "--use_ema")
    assert "ended with 2" in refused(*USUAL, "--", "--wrong")
    assert "no such file" in refused("--checkpoint", "none.pt", "--prompt", "b").lower()
    assert "unknown recipe" in refused(*USUAL, recipe="rtm-2bit")
    assert "leave out checkpoint, prompt" in refused(*USUAL, model="longlive-v1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs an NVIDIA GPU" in refused(*USUAL)


def test_causvid_takes_a_folder(tmp_path):
    options = checkout.RunOptions(checkpoint=tmp_path, config=Path("c"), out=Path("o"))
    made = checkout.causvid_arguments(options, Path("p"))
    assert made[:4] == ["--config_path", "c", "--checkpoint_folder", str(tmp_path)]
    with pytest.raises(ValueError, match="no option for seed"):
        checkout.causvid_arguments(checkout.RunOptions(seed=1), Path("p"))
    with pytest.raises(ValueError, match="the folder that holds model.pt"):
        checkout.causvid_arguments(checkout.RunOptions(checkpoint=tmp_path / "x.pt"), Path("p"))
