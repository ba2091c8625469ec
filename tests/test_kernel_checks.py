"""A first use that tells nothing of a kernel decides nothing; checks see more than one block."""

import pytest
import torch

from videokv.kernels import gpu

pytest.importorskip("triton")
import videokv.kernels.assign_centroids as clustering  # noqa: E402
import videokv.kernels.code_repair as repair  # noqa: E402
import videokv.kernels.fit_factor as fitting  # noqa: E402
import videokv.kernels.quantize_groups as groups  # noqa: E402
import videokv.kernels.reconstruct as reconstruction  # noqa: E402
import videokv.kernels.score_columns as columns  # noqa: E402
from videokv.kernels.assign_centroids import (  # noqa: E402
    few,
    triton_few,  # noqa: E402
    triton_step,
)
from videokv.kernels.assign_centroids import triton as centroid_kernels  # noqa: E402
from videokv.kernels.reconstruct import triton as reconstruct_kernel  # noqa: E402
from videokv.noise import QueryMap  # noqa: E402
from videokv.protocols import EncodeContext  # noqa: E402
from videokv.quantizers.groupwise import Groupwise  # noqa: E402
from videokv.quantizers.rotated import Rotated  # noqa: E402
from videokv.rotation import Rotation  # noqa: E402
from videokv.tensors import GroupFormat, map_tensors  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMAT = GroupFormat(2, 32)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture(autouse=True)
def no_machine(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    for room in (clustering, repair, groups, columns, reconstruction):
        monkeypatch.setattr(room, "machine_refusal", lambda device: None)


def with_one(x, number):
    x = x.clone()
    x[0, 0, 0, 0] = number
    return x


X = draw(1, 2, 70, 64)
BASIS = torch.linalg.qr(draw(1, 2, 64, 3, seed=1)).Q
QUERY_MAP = QueryMap(32, None, BASIS)
ASKED = {
    "k-means": (
        clustering.kernel_refusal,
        [torch.zeros_like(X), torch.ones_like(X), with_one(X, torch.inf), with_one(X, torch.nan)],
    ),
    "repair": (
        lambda x: repair.kernel_refusal(x, BASIS),
        [torch.zeros_like(X), with_one(X, torch.inf), with_one(X, torch.nan)],
    ),
    "groups": (
        lambda x: groups.kernel_refusal(x, format=FORMAT),
        [X * 1e5, with_one(X, torch.inf), with_one(X, torch.nan)],
    ),
    "columns of queries": (
        lambda x: columns.kernel_refusal(x, [QUERY_MAP], scale=0.1, width=80, kv_heads=2),
        [with_one(X, torch.inf), with_one(X, torch.nan)],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_inputs_that_tell_nothing_refuse_that_call_alone(name):
    ask, useless = ASKED[name]
    for x in useless:
        assert ask(x) is not None
    assert ask(X) is None


def test_an_error_of_any_other_kind_is_kept():
    calls = []

    def broken():
        calls.append(1)
        raise ValueError("no room")

    for _ in range(2):
        found = gpu.checked_refusal("kernel", 0, torch.device("cpu"), broken)
        assert found == "ValueError: no room"
    assert len(calls) == 1


def test_more_heads_than_a_grid_has_programs_are_refused(monkeypatch):
    monkeypatch.setattr(columns, "_LARGEST_GRID", 1)
    assert "more than 1" in columns._maps_refusal(X, [QUERY_MAP])
    assert "more than 1" in columns._filling_refusal(X, [(0, X)])
    monkeypatch.setattr(fitting, "_LARGEST_GRID", 1)
    monkeypatch.setattr(fitting, "kernel_refusal", lambda *_, **__: None)
    monkeypatch.setattr(fitting, "_kernel", lambda: pytest.fail("launched"))
    fitting.fit_factor(X, X, X, X[..., :2], X[..., :2], scale=0.1)


def test_the_check_of_reconstruct_has_programs_of_several_blocks(monkeypatch):
    quantizer = Rotated(Groupwise(FORMAT))
    chunk = quantizer.encode(draw(1, 2, 300, 128).cpu(), EncodeContext(0, "key"))
    parts = map_tensors(chunk.parts(), lambda t: t.to(DEVICE))
    assert reconstruction._self_check(parts, torch.float16, None) is None
    right, loops = reconstruct_kernel._kernel, []

    class Wrong:
        def __getitem__(self, grid):
            def launch(out, *arguments, LOOP, **constants):
                right[grid](out, *arguments, LOOP=LOOP, **constants)
                loops.append(LOOP)
                if LOOP:  # a kernel that is wrong in its later blocks only
                    out[:, :, -64:] += 1

            return launch

    monkeypatch.setattr(reconstruct_kernel, "_kernel", Wrong())
    assert "self-check failed" in reconstruction._self_check(parts, torch.float16, None)
    assert loops == [False, True]


def test_the_checks_of_k_means_have_programs_of_several_blocks():
    assert clustering._TOKENS > triton_step.STEP_TOKENS * triton_step.STEP_STRETCHES
    assert clustering._TOKENS > centroid_kernels.SUM_TOKENS * centroid_kernels.STRETCHES
    assert few._TOKENS > 64 * triton_few.STRETCHES


def test_a_rotation_and_clusters_do_not_come_together():
    clusters = clustering.Clusters(torch.zeros(1, 2, 70).to(DEVICE, torch.uint8), X.bfloat16())
    with pytest.raises(ValueError, match="one of them"):
        groups.quantize_packed(X, format=FORMAT, rotation=Rotation(64), clusters=clusters)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_streams_do_not_share_what_they_upload():
    from videokv.kernels.score_columns.placement import Part, Placement

    parts, weights = (Part(60, ((2, 0, 4),)),), [torch.ones(1, 2, 60, 4, device="cuda")]
    first, again = (Placement.of(weights, parts, columns=6) for _ in range(2))
    with torch.cuda.stream(torch.cuda.Stream()):
        other = Placement.of(weights, parts, columns=6)
    assert first.tiles is again.tiles and other.tiles is not first.tiles
