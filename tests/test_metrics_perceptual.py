"""LPIPS, FLIP, flicker, the uniform SSIM and the protocols."""

import numpy as np
import pytest
import torch

from videokv.metrics import NotAvailable, flicker, flip, lpips, measure, protocol, ssim
from videokv.metrics.lpips import BACKBONES, Lpips, load_network, with_weights


def clip(seed: int, frames: int = 3, height: int = 63, width: int = 80) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def random_network(net: str) -> Lpips:
    """Weights made on the spot, under the names of the published files."""
    generator = torch.Generator().manual_seed(3)
    bare = Lpips(net)
    backbone = {
        name: torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5
        for name, value in bare.state_dict().items()
        if name.startswith("features.")
    }
    heads = {
        f"lin{i}.model.1.weight": torch.rand(head.shape, generator=generator)
        for i, head in enumerate(bare.heads)
    }
    return with_weights(net, {**backbone, "classifier.1.weight": torch.zeros(1)}, heads)


def by_hand(network: Lpips, x: np.ndarray, y: np.ndarray) -> float:
    """The published formula in float64, written out."""
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    deep = [m.double() for m in network.features]
    total = []
    for a, b in zip(x, y, strict=True):
        pair = [(torch.from_numpy(z).double() / 255 * 2 - 1 - shift) / scale for z in (a, b)]
        p, q = (z.permute(2, 0, 1)[None] for z in pair)
        value, found = 0.0, 0
        for number, module in enumerate(deep):
            p, q = module(p), module(q)
            if number in network.taps:
                u = p / p.norm(dim=1, keepdim=True) - q / q.norm(dim=1, keepdim=True)
                u = torch.nan_to_num(u)
                value += float((u.square() * network.heads[found].double()).sum(1).mean())
                found += 1
        total.append(value)
    network.float()
    return float(np.mean(total))


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_is_the_published_formula(net: str) -> None:
    network = random_network(net)
    a, b = clip(0, 2), clip(1, 2)
    found = lpips(a, b, net=net, network=network)
    assert found == pytest.approx(by_hand(network, a, b), rel=1e-3)
    assert found > 0.01 and lpips(a, a, net=net, network=network) == 0


def test_the_layers_are_those_of_the_published_files() -> None:
    import torchmetrics

    folder = torchmetrics.__path__[0] + "/functional/image/lpips_models"
    for net in BACKBONES:
        heads = torch.load(f"{folder}/{net}.pth", weights_only=True, map_location="cpu")
        assert [tuple(h.shape) for h in heads.values()] == [
            tuple(h.shape) for h in Lpips(net).heads
        ]
    names = [n for n in Lpips("vgg").state_dict() if n.endswith("weight")]
    wanted = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    assert names == [f"features.{i}.weight" for i in wanted]


def test_every_range_gives_the_same_score_and_a_wrong_one_is_refused() -> None:
    network = random_network("alex")
    a, b = clip(0), clip(1)
    unit = [torch.from_numpy(x).float() / 255 for x in (a, b)]
    signed = [x * 2 - 1 for x in unit]
    expected = lpips(a, b, network=network)
    assert lpips(*unit, network=network) == pytest.approx(expected, rel=1e-5)
    converted = [((x + 1) / 2).clamp(0, 1) for x in signed]
    assert lpips(*converted, network=network) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match=r"from \[-1, 1\]"):
        lpips(*signed, network=network)
    assert lpips(a, b, network=network, rescale=False) != pytest.approx(expected, rel=1e-3)


def test_missing_and_damaged_weights_are_said(tmp_path, monkeypatch) -> None:
    load_network.cache_clear()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def refuse(url: str, timeout: float):
        raise OSError("no route")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(NotAvailable, match="alexnet-owt-7be5be79.pth.*no route"):
        lpips(clip(0), clip(1))
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / BACKBONES["alex"].file).write_bytes(b"x")
    with pytest.raises(NotAvailable, match="damaged"):
        lpips(clip(0), clip(1))
    found = measure(clip(0), clip(1), under=protocol("all"))
    assert "damaged" in found.missing["lpips_alex"] and "ssim" in found.figures


def test_flip_of_known_pairs() -> None:
    pytest.importorskip("flip_evaluator", reason="flip-evaluator is not installed")
    black = np.zeros((2, 40, 48, 3), np.uint8)
    assert flip(black, black) == pytest.approx(0, abs=1e-6)
    assert flip(black + 255, black) > 0.8
    assert flip(black + 10, black) < flip(black + 60, black)


def test_flicker_counts_changes_and_not_offsets() -> None:
    base = torch.rand(5, 8, 8, 3, generator=torch.Generator().manual_seed(0)) * 0.5
    assert flicker(base + 0.25, base) == pytest.approx(0, abs=1e-7)
    alternating = base.clone()
    alternating[1::2] += 0.1
    assert flicker(alternating, base) == pytest.approx(0.1, abs=1e-6)
    with pytest.raises(ValueError, match="at least two"):
        flicker(base[:1], base[:1])


def test_uniform_ssim_against_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage", reason="scipy is not installed")
    a, b = clip(0, 1), clip(1, 1)
    x, y = a[0] / 255, (0.7 * a[0] + 0.3 * b[0]).astype(np.uint8) / 255

    def mean(z):
        return ndimage.uniform_filter(z, (11, 11, 0), mode="constant")

    mx, my = mean(x), mean(y)
    cov, vx, vy = mean(x * y) - mx * my, mean(x * x) - mx**2, mean(y * y) - my**2
    score = (2 * mx * my + 1e-4) * (2 * cov + 9e-4)
    score /= (mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)
    found = ssim(x[None].astype(np.float64), y[None].astype(np.float64), variant="qvg")
    assert found == pytest.approx(score.mean(), abs=1e-6)
    with pytest.raises(ValueError, match="variant"):
        ssim(a, a, variant="box")


def test_protocols_take_their_frames_and_are_named(monkeypatch) -> None:
    a = clip(0, 7)
    b = a.copy()
    b[0] = 255 - b[0]
    monkeypatch.setattr("videokv.metrics.measures.lpips", lambda *_, **__: 0.5)
    every, first, qvg = (
        measure(a, b, under=protocol(name, chunk_frames=2))
        for name in ("all", "first-chunk", "qvg")
    )
    assert (every.frames, first.frames, qvg.frames) == (7, 2, 6)
    assert (every.identical_frames, first.identical_frames, qvg.identical_frames) == (6, 1, 6)
    assert qvg.protocol == "qvg" and qvg.figures["psnr_db"] == 100
    assert first.figures["psnr_db"] < every.figures["psnr_db"]
    with pytest.raises(ValueError, match="first-chunk"):
        protocol("last")
    with pytest.raises(ValueError, match="starts at frame 1"):
        measure(a[:1], b[:1], under=protocol("qvg"))
