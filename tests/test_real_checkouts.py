"""The real code of each family, where a checkout is given: tiny, random weights, on the CPU.

    VIDEOKV_SELF_FORCING=/path/to/Self-Forcing pytest tests/test_real_checkouts.py

Needs, beside this project, what the repositories import: diffusers, transformers, einops, easydict,
ftfy, loguru.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from videokv.studies.checkout_models import CHECKOUTS, edited

FAMILIES = {
    "self-forcing": "VIDEOKV_SELF_FORCING",
    "self-forcing-window": "VIDEOKV_SELF_FORCING",
    "causal-forcing": "VIDEOKV_CAUSAL_FORCING",
    "rolling-forcing": "VIDEOKV_ROLLING_FORCING",  # the folder long_video of Causal-Forcing
    "causvid": "VIDEOKV_CAUSVID",
    "longlive-v1": "VIDEOKV_LONGLIVE_V1",  # branch v1.0
    "longlive": "VIDEOKV_LONGLIVE",
    "longlive-relative": "VIDEOKV_LONGLIVE",
    "matrix-game": "VIDEOKV_MATRIX_GAME_2",  # the folder Matrix-Game-2
    "lingbot": "VIDEOKV_LINGBOT",  # a folder with wan/modules/model_fast.py
    "lingbot-causal": "VIDEOKV_LINGBOT",
    "krea": "VIDEOKV_KREA",
    "longcat": "VIDEOKV_LONGCAT",
    "hy-worldplay": "VIDEOKV_HY_WORLDPLAY",
    "hy-worldplay-wan": "VIDEOKV_HY_WORLDPLAY",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    path = os.environ.get(FAMILIES[family])
    if not path:
        pytest.skip(f"set {FAMILIES[family]} to a checkout")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "checkouts.py"), family, path],
        env={**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["repeatable"] and result["restored"] and result["spread"] > 0.1
    assert result["checked_layers"] == [0, 1] and result["largest_error"] < 0.01
    recipes = dict(result["recipes"])
    assert recipes.pop("bf16")["equal"]
    two, four, eight = (recipe["error"] for recipe in recipes.values())
    assert two > four > eight and eight < 0.01 and two < 0.3
    assert len({recipe["encode_calls"] for recipe in recipes.values()}) == 1
    assert all(recipe["encode_calls"] > 0 for recipe in recipes.values())


SCRIPTS = {
    "self-forcing": "VIDEOKV_SELF_FORCING",
    "causal-forcing": "VIDEOKV_CAUSAL_FORCING",
    "rolling-forcing": "VIDEOKV_ROLLING_FORCING",
    "causvid": "VIDEOKV_CAUSVID",
    "longlive-v1": "VIDEOKV_LONGLIVE_V1",
    "longlive": "VIDEOKV_LONGLIVE",
    "matrix-game-2": "VIDEOKV_MATRIX_GAME_2",
    "lingbot-world-2": "VIDEOKV_LINGBOT",
    "krea": "VIDEOKV_KREA",
    "longcat-video": "VIDEOKV_LONGCAT",
    "hy-worldplay": "VIDEOKV_HY_WORLDPLAY",
    "hy-worldplay-wan": "VIDEOKV_HY_WORLDPLAY",
    "magi-1": "VIDEOKV_MAGI_1",
}


@pytest.mark.parametrize("name", CHECKOUTS)
def test_videokv_run_names_what_is_there(name):
    """The script, its arguments, its usual config and the call that is watched."""
    path = os.environ.get(SCRIPTS[name])
    if not path:
        pytest.skip(f"set {SCRIPTS[name]} to a checkout")
    known, root = CHECKOUTS[name], Path(path)
    script = (root / known.entry).read_text()
    flags = [*known.takes.values(), *(text for text in known.fixed if text.startswith("--"))]
    for flag in flags:
        assert f'"{flag}"' in script or f"'{flag}'" in script
    module = ast.parse((root / (known.module.replace(".", "/") + ".py")).read_text())
    (cls,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == known.cls)
    method = next(n for n in cls.body if getattr(n, "name", "") == known.method)
    inner = [n for n in cls.body if getattr(n, "name", "") == "_forward_inference"]
    names = {a.arg for m in [method, *inner] for a in [*m.args.args, *m.args.kwonlyargs]}
    assert set(known.marks) <= names
    if known.config is not None:
        config = (root / known.config).read_text()
        edited(config, {key: "1" for key in known.edits.values()})
