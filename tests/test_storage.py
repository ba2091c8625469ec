"""Saving and loading: exact, whole or not at all, and refusing what is not right."""

import json
import os
import resource
import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from cache_fakes import FakePacked, FakeQuantizer, FakeRecipe, fill, rows

import videokv
from videokv.cache import CachePolicy, KVCache, storage

NAMES = ["bf16", "rtn-2bit", "quarot-2bit+calibrated", "rtn-8bit+measured"]


def filled(name, **options):
    policy = CachePolicy(sink_chunks=1, recent_chunks=1, window_chunks=3)
    cache = videokv.recipe(name, policy=policy, **options).new_cache(layers=2, scale=0.2)
    fill(cache, [9, 8, 7, 6, 5], size=32, dtype=torch.bfloat16)
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact_and_goes_on(name, tmp_path):
    cache, path = filled(name), tmp_path / "cache.safetensors"
    _, k, v = rows(3, size=32, dtype=torch.bfloat16)
    cache.write(0, 35, k, v)
    videokv.save(cache, path)
    again = videokv.load(path, expected=cache.recipe, record_mass=True)
    assert again.recipe == cache.recipe and again.length == cache.length
    ours, theirs = cache.memory(), again.memory()
    assert (ours.held_bytes, ours.state_bytes) == (theirs.held_bytes, theirs.state_bytes)
    for each in (cache, again):
        q, k, v = rows(3, size=32, dtype=torch.bfloat16)
        for layer in range(2):
            each.write(layer, 35, k, v, q)
        each.commit(38)
    q, k, v = rows(4, size=32, dtype=torch.bfloat16)
    for layer in range(2):
        assert torch.equal(cache.attend(layer, q, k, v), again.attend(layer, q, k, v))


def test_options_of_the_recipe_are_kept(tmp_path):
    cache = filled("rtn-4bit", group_size=16, scale_dtype=torch.float16, seed=7)
    videokv.save(cache, tmp_path / "c")
    assert videokv.load(tmp_path / "c").recipe == cache.recipe
    with pytest.raises(ValueError, match="expected"):
        videokv.load(tmp_path / "c", expected="rtn-4bit")


def test_own_classes_are_named(tmp_path):
    cache, path = KVCache(FakeRecipe()), tmp_path / "c"
    with pytest.raises(ValueError, match=r"cannot save a .*FakeRecipe.*classes="):
        videokv.save(cache, path)
    assert list(tmp_path.iterdir()) == []
    own = [FakeRecipe, FakeQuantizer, FakePacked]
    videokv.save(cache, path, classes=own)
    with pytest.raises(ValueError, match=r"FakeRecipe, which is not in the list"):
        videokv.load(path)


def test_shared_tensors_are_written_once(tmp_path):
    cache = filled("rtn-2bit")
    state = cache.layer_states()[0]
    shared = {0: state, 1: state}
    cache.restore(shared, length=cache.length)
    held = cache.memory().held_bytes
    videokv.save(cache, tmp_path / "c")
    assert videokv.load(tmp_path / "c").memory().held_bytes == held


def damaged(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(bytes(data))


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "cache.safetensors"
    whole = filled("rtn-2bit")

    def flip(data):
        data[-100] ^= 16

    for change, message in [
        (flip, "damaged .its checksum"),
        (lambda data: data.__delitem__(slice(-200, None)), "damaged or no safetensors"),
        (lambda data: data.__setitem__(slice(0, 8), b"\xff" * 8), "damaged or no safetensors"),
        (lambda data: data.clear(), "damaged or no safetensors"),
    ]:
        videokv.save(whole, path)
        damaged(path, change)
        with pytest.raises(ValueError, match=message) as error:
            videokv.load(path)
        assert str(path) in str(error.value)


def edited(path, edit):
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[storage.HEADER])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    edit(header, tensors)
    text = json.dumps(header)
    metadata = {storage.HEADER: text, storage.HEADER_CHECKSUM: storage.header_checksum(text)}
    safetensors.torch.save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h, t: h.update(format=99), "format 99, this version reads 3"),
        (lambda h, t: t.pop("t1"), "t1 is missing"),
        (lambda h, t: h["recipe"].update({"class": "os.system"}), "os.system"),
        (lambda h, t: h["recipe"]["fields"].pop("seed"), "has fields"),
        (lambda h, t: h.pop("layers"), "layers"),
        (lambda h, t: h["recipe"]["fields"].update(seed=-1), "seed"),
        (lambda h, t: h.update(length=7), "layer 0 does not hold the 7 tokens"),
        (lambda h, t: h["layers"].update({"0": 3}), "layer 0 does not hold"),
        (lambda h, t: t.update(t1=t["t1"].view(torch.int8)), "t1 is missing or damaged"),
        (lambda h, t: t.update(t1=t["t1"].flatten()), "t1 is missing or damaged"),
        (lambda h, t: t.update(more=torch.zeros(2)), "more is missing or damaged"),
        (lambda h, t: h["options"].update(dict=[[[], 1]]), "cannot be read"),
        (lambda h, t: h["options"].update(dict=[[{"dtype": "no"}, 1]]), "cannot be read"),
    ],
)
def test_mismatched_files_are_refused(edit, message, tmp_path):
    videokv.save(filled("rtn-2bit"), tmp_path / "c")
    edited(tmp_path / "c", edit)
    with pytest.raises(ValueError, match=message):
        videokv.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'length\\": 35', b'length\\": 36'),
        (b'seed\\": 0', b'seed\\": 1'),
        (b'sink_chunks\\": 1', b'sink_chunks\\": 0'),
        (b"bfloat16", b"bfloat61"),
        (b'"U8"', b'"I8"'),
        (b'"BF16"', b'"F16" '),
    ],
)
def test_a_damaged_header_is_refused(old, new, tmp_path):
    path = tmp_path / "c"
    videokv.save(filled("rtn-2bit"), path)
    whole = path.read_bytes()
    assert old in whole and len(old) == len(new)
    path.write_bytes(whole.replace(old, new, 1))
    with pytest.raises(ValueError, match="damaged"):
        videokv.load(path)


def test_no_flipped_byte_passes(tmp_path):
    path = tmp_path / "c"
    cache = filled("quarot-2bit+calibrated")
    videokv.save(cache, path)
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    for at in [*range(0, header, max(1, header // 400)), *range(header, len(whole), 997)]:
        data = bytearray(whole)
        data[at] ^= 1 << (at % 7)
        path.write_bytes(bytes(data))
        with pytest.raises(ValueError):
            videokv.load(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        videokv.load(tmp_path / "none")
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match="not a saved cache"):
        videokv.load(tmp_path / "other")


def test_nothing_half_written(tmp_path, monkeypatch):
    path = tmp_path / "c"
    videokv.save(filled("rtn-2bit"), path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        videokv.save(filled("rtn-4bit"), path)
    monkeypatch.undo()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError):
        videokv.save(filled("rtn-2bit"), tmp_path / "no folder" / "c")


FULL_DISK = """
import resource, signal, sys, torch, videokv
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cache = videokv.recipe("rtn-2bit").new_cache()
x = torch.randn(1, 2, 512, 128)
cache.write(0, 0, x, x, x)
cache.commit(512)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    videokv.save(cache, sys.argv[1])
except OSError as error:
    print("refused", error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no file size limit here")
def test_full_disk_leaves_no_file(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused") and list(tmp_path.iterdir()) == []
