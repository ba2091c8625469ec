"""LPIPS (Zhang et al., 2018): distance of deep features, AlexNet or VGG16, version 0.1.

    d = sum_l mean_hw w_l . (f_l(x) / |f_l(x)| - f_l(y) / |f_l(y)|)^2

The linear heads w come with torchmetrics. The backbones are torchvision's ImageNet weights: read
from torch's hub folder, fetched once where they are not there, checked by the digest in the name.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from videokv.metrics.frames import Frames, unit_pair
from videokv.metrics.unavailable import NotAvailable

Net = Literal["alex", "vgg"]
MEAN, STD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of the network's input in [-1, 1]
FETCH_TIMEOUT_S = 20
NORM_EPSILON = 1e-10
BATCH_FRAMES = 8
SMALLEST_PX = {"alex": 31, "vgg": 16}


@dataclass(frozen=True)
class Backbone:
    """file: of the ImageNet weights, with the start of its SHA-256; taps: modules whose output is
    a feature; layers: (in, out, kernel, stride, padding) of a convolution, or a pooling window."""

    file: str
    layers: tuple[tuple[int, ...], ...]
    pool: tuple[int, int]
    taps: tuple[int, ...]


_VGG_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _vgg_layers() -> tuple[tuple[int, ...], ...]:
    layers: list[tuple[int, ...]] = []
    before = 3
    for number, widths in enumerate(_VGG_WIDTHS):
        if number:
            layers.append(())
        for width in widths:
            layers.append((before, width, 3, 1, 1))
            before = width
    return tuple(layers)


BACKBONES: dict[str, Backbone] = {
    "alex": Backbone(
        "alexnet-owt-7be5be79.pth",
        (
            (3, 64, 11, 4, 2), (), (64, 192, 5, 1, 2), (), (192, 384, 3, 1, 1),
            (384, 256, 3, 1, 1), (256, 256, 3, 1, 1),
        ),
        pool=(3, 2),
        taps=(1, 4, 7, 9, 11),
    ),
    "vgg": Backbone("vgg16-397923af.pth", _vgg_layers(), pool=(2, 2), taps=(3, 8, 15, 22, 29)),
}  # fmt: skip


class Lpips(nn.Module):
    """The network: backbone ``features`` and one ``heads`` weight ``[1, C, 1, 1]`` a feature."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        shape = BACKBONES[net]
        modules: list[nn.Module] = []
        for layer in shape.layers:
            if not layer:
                modules.append(nn.MaxPool2d(*shape.pool))
                continue
            before, width, kernel, stride, padding = layer
            modules += [nn.Conv2d(before, width, kernel, stride, padding), nn.ReLU()]
        self.features = nn.Sequential(*modules)
        self.taps = shape.taps
        widths = [layer[1] for layer in shape.layers if layer]
        kept = widths if net == "alex" else [group[-1] for group in _VGG_WIDTHS]
        self.heads = nn.ParameterList(nn.Parameter(torch.ones(1, c, 1, 1)) for c in kept)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances ``[T]`` of images ``[T, 3, H, W]`` in [-1, 1]."""
        total = x.new_zeros(len(x))
        for head, p, q in zip(self.heads, self._taps(x), self._taps(y), strict=True):
            squares = (_unit_length(p) - _unit_length(q)).square()
            total = total + (squares * head).sum(1).mean((1, 2))
        return total

    def _taps(self, x: Tensor) -> list[Tensor]:
        mean, std = (x.new_tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
        x = (x - mean) / std
        found = []
        for number, module in enumerate(list(self.features)[: self.taps[-1] + 1]):
            x = module(x)
            if number in self.taps:
                found.append(x)
        return found


def lpips(
    frames: Frames,
    reference: Frames,
    *,
    net: Net = "alex",
    rescale: bool = True,
    network: Lpips | None = None,
) -> float:
    """Mean over frames of the distance between clips ``[T, H, W, 3]``, uint8 or in [0, 1].

    rescale: bring [0, 1] to the [-1, 1] that the network was fitted to. False feeds [0, 1] as it
        is, which makes every score look better; only the ``qvg`` protocol does so.
    network: one with its weights, instead of the published one.

    Raises:
        NotAvailable: the weights are not here and cannot be fetched.
        ValueError: unequal shapes, values out of [0, 1] (for [-1, 1] give (x + 1) / 2), frames
            too small.
    """
    if net not in BACKBONES:
        raise ValueError(f"net must be one of {tuple(BACKBONES)}, got {net!r}")
    x, y = (clip.float() for clip in unit_pair(frames, reference))
    if min(x.shape[-2:]) < SMALLEST_PX[net]:
        raise ValueError(
            f"LPIPS with {net} needs frames of at least {SMALLEST_PX[net]} pixels a side, got "
            f"{tuple(x.shape[-2:])}"
        )
    if rescale:
        x, y = 2 * x - 1, 2 * y - 1
    network = (load_network(net) if network is None else network).to(x.device)
    with torch.no_grad():
        pairs = zip(x.split(BATCH_FRAMES), y.split(BATCH_FRAMES), strict=True)
        return float(torch.cat([network(p, q) for p, q in pairs]).double().mean())


@functools.lru_cache(maxsize=2)
def load_network(net: Net) -> Lpips:
    """The published network; NotAvailable where its weights cannot be had."""
    backbone = BACKBONES[net]
    return with_weights(net, _state(_backbone_path(backbone.file)), _state(_heads_path(net)))


def with_weights(net: Net, backbone: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> Lpips:
    """A network from torchvision's ``features.*`` and LPIPS's ``lin<i>.model.1.weight``."""
    network = Lpips(net)
    weights = {name: v for name, v in backbone.items() if name.startswith("features.")}
    count = len(network.heads)
    weights |= {f"heads.{i}": heads[f"lin{i}.model.1.weight"] for i in range(count)}
    network.load_state_dict(weights)
    return network.requires_grad_(False).eval()


def _unit_length(x: Tensor) -> Tensor:
    return x / (x.square().sum(1, keepdim=True).sqrt() + NORM_EPSILON)


def _state(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def _heads_path(net: Net) -> Path:
    folder = resources.files("torchmetrics") / "functional" / "image" / "lpips_models"
    path = Path(str(folder)) / f"{net}.pth"
    if not path.is_file():
        raise NotAvailable(
            f"LPIPS heads are not in this torchmetrics: {path}; install 1.4 or later"
        )
    return path


def _backbone_path(file: str) -> Path:
    path = Path(torch.hub.get_dir()) / "checkpoints" / file
    if not path.is_file():
        _fetch(f"https://download.pytorch.org/models/{file}", path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wanted = path.stem.rpartition("-")[2]
    if not digest.startswith(wanted):
        raise NotAvailable(f"{path} is damaged: its SHA-256 starts {digest[:8]}, not {wanted}")
    return path


def _fetch(url: str, path: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
            content = answer.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except (urllib.error.URLError, OSError) as error:
        raise NotAvailable(
            f"the ImageNet weights {path.name} are not in {path.parent} and could not be fetched "
            f"({error}); put the file there"
        ) from error
