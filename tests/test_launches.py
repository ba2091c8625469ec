"""A kernel that was compiled for one launch is taken again for those that Triton would take it for,
and for no other."""

import pytest
import torch

import videokv
from videokv.kernels import launches as module
from videokv.kernels.launches import Launches, alike
from videokv.protocols import EncodeContext

pytest.importorskip("triton")
from videokv.kernels.assign_centroids import triton_few, triton_step  # noqa: E402
from videokv.kernels.attend import Call, Rows, Tile, attend  # noqa: E402
from videokv.kernels.attend import triton as attending  # noqa: E402
from videokv.kernels.copy_rows import triton as copying  # noqa: E402
from videokv.kernels.merge_tail import triton as merging  # noqa: E402
from videokv.kernels.quantize_groups import triton as quantizing  # noqa: E402
from videokv.kernels.quantize_unbiased import triton as unbiased  # noqa: E402
from videokv.kernels.reconstruct import triton as decoding  # noqa: E402
from videokv.kernels.reconstruct.plan import Job, batches  # noqa: E402
from videokv.kernels.score_columns import stacked_bases  # noqa: E402
from videokv.kernels.score_columns import triton as columns  # noqa: E402
from videokv.kernels.score_columns.placement import Part, Placement  # noqa: E402
from videokv.noise import QueryMap  # noqa: E402
from videokv.rotation import Rotation  # noqa: E402
from videokv.tensors import GroupFormat, walk_tensors  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def run(self):
        raise AssertionError("not called by itself")

    def __getitem__(self, grid):
        assert grid == (3, 1, 1)
        return lambda *arguments: self.kernel.again.append(arguments)


class Kernel:
    """A JIT function of two tensors and a number, with two constants."""

    arg_names = ("x", "y", "rows", "SIZE", "WIDE")

    def __init__(self, *, compiles=True):
        self.compiles, self.looked_at, self.again = compiles, [], []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            assert constants == CONSTANTS
            self.looked_at.append(arguments)
            return Compiled(self) if self.compiles else None

        return launch


CONSTANTS = {"WIDE": True, "SIZE": 64, "num_warps": 4}


def room(dtype=torch.float32, *, first=0):
    """Memory that begins at 16 bytes, from an element on."""
    return torch.zeros(64, dtype=dtype)[first:]


def test_other_memory_and_the_same_numbers_take_the_same_kernel():
    kernel = Kernel()
    launches = Launches(kernel, (3,), CONSTANTS)
    launches(room(), None, 7)
    x = room()
    launches(x, None, 7)
    assert len(kernel.looked_at) == 1
    ((first, *others),) = kernel.again
    assert first is x and others == [None, 7, 64, True], "constants come in the kernel's order"


@pytest.mark.parametrize(
    "changed",
    [
        (room(), None, 16),  # a multiple of 16
        (room(), None, 1 << 40),  # no 32 bits
        (room(first=1), None, 7),  # not aligned
        (room(torch.bfloat16), None, 7),
        (room(torch.bfloat16, first=2), None, 7),
        (room(), room(), 7),  # not None
    ],
)
def test_what_a_kernel_is_chosen_by_is_looked_at_again(changed):
    kernel = Kernel()
    launches = Launches(kernel, (3,), CONSTANTS)
    launches(room(), None, 7)
    for _ in range(2):
        launches(*changed)
    assert len(kernel.looked_at) == 2 and len(kernel.again) == 1
    launches(room(), None, 7)
    assert len(kernel.looked_at) == 3, "the last one is kept, not both"


def test_dtypes_of_memory_that_is_not_aligned_are_told_apart():
    kernel = Kernel()
    launches = Launches(kernel, (3,), CONSTANTS)
    launches(room(first=1), None, 7)
    launches(room(torch.bfloat16, first=2), None, 7)
    assert len(kernel.looked_at) == 2


class Descriptor:
    def __init__(self, dtype=torch.bfloat16, *, rows=64, block=(16, 64)):
        self.base = torch.zeros(rows, 64, dtype=dtype)
        self.shape, self.block_shape, self.layout = [rows, 64], list(block), "swizzled"


def test_descriptors_of_other_rows_take_the_same_kernel():
    kernel = Kernel()
    launches = Launches(kernel, (3,), CONSTANTS)
    launches(Descriptor(), None, 7)
    launches(Descriptor(rows=80), None, 7)
    assert len(kernel.looked_at) == 1
    for number, other in enumerate((Descriptor(torch.float16), Descriptor(block=(32, 64)))):
        launches(other, None, 7)
        assert len(kernel.looked_at) == number + 2


def test_the_interpreter_looks_at_every_launch():
    kernel = Kernel(compiles=False)
    launches = Launches(kernel, (3,), CONSTANTS)
    for _ in range(2):
        launches(room(), room(), 7)
    assert len(kernel.looked_at) == 2 and not kernel.again


def test_what_is_alike_shares_its_launches():
    kernel, device = Kernel(), torch.device("cpu")
    first = alike(kernel, (3,), device, WIDE=True, SIZE=64)
    assert alike(kernel, (3,), device, WIDE=True, SIZE=64) is first
    others = [
        alike(kernel, (4,), device, WIDE=True, SIZE=64),
        alike(kernel, (3,), device, WIDE=True, SIZE=32),
        alike(Kernel(), (3,), device, WIDE=True, SIZE=64),
        alike(kernel, (3,), torch.device("cuda:1"), WIDE=True, SIZE=64),
    ]
    assert all(other is not first for other in others)


class Interpreted:
    """A kernel of the interpreter that gives something compiled, as on a GPU: called with all
    arguments and constants in the kernel's order."""

    def __init__(self, kernel):
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.kernel[grid](*arguments, **constants)
            return self

        return launch if grid is not None else None

    def run(self):
        raise AssertionError("not called by itself")


@pytest.fixture
def kept(monkeypatch):
    """Launches by a kernel that was kept."""
    made, called, found = Launches.__init__, Launches.__call__, []

    def make(self, kernel, grid, constants):
        made(self, Interpreted(kernel) if DEVICE == "cpu" else kernel, grid, constants)

    def call(self, *arguments):
        before = self._kept
        called(self, *arguments)
        if self._kept is before and before[1] is not None:
            found.append(self)

    monkeypatch.setattr(Launches, "__init__", make)
    monkeypatch.setattr(Launches, "__call__", call)
    for cache in (module._made, quantizing.planned):
        cache.cache_clear()
    yield found
    for cache in (module._made, quantizing.planned):
        cache.cache_clear()


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def copied(seed):
    x = draw(1, 40, 2, 32, seed=seed).transpose(1, 2)
    out = torch.zeros(1, 2, 40, 32, device=DEVICE)
    copying.copy_rows([(x, out)])
    return [out]


def merged(seed):
    parts = [(1, 2, 20, 32), (1, 2, 20), (3, 2, 9, 32), (3, 2, 9)]
    return merging.merge_tail(*(draw(*shape, seed=seed + n) for n, shape in enumerate(parts)))


def means(seed):
    x = draw(1, 2, 300, 32, seed=seed).half()
    return triton_step.cluster(x, x[:, :, :8].float(), iterations=3)


def few(seed):
    x = draw(1, 2, 300, 32, seed=seed)
    start = triton_few.spread(x, count=3, seed=1)
    return triton_few.few_centres(x, start, iterations=2, bits=2)


def grouped(seed):
    options = {"rotation": None, "clusters": None, "away": False}
    packed, facts = quantizing.launch(
        draw(1, 2, 40, 64, seed=seed), format=GroupFormat(2, 32), **options
    )
    return [*walk_tensors(packed), facts]


def steps(seed):
    ideal, largest = draw(1, 2, 40, 4, seed=seed).abs(), draw(2, 2, 3, seed=seed).abs()
    return unbiased.code_steps(ideal, largest)


BATCH: list = []
PLACEMENT: list = []
WIDENING: list = []


def decoded(seed):
    """The same chunks into other memory."""
    if not BATCH:
        keys = videokv.recipe("quarot-2bit").keys
        chunk = keys.encode(draw(1, 2, 40, 64, seed=0), EncodeContext(0, "key"))
        plan = decoding.planned(chunk.parts(), torch.float32, torch.device(DEVICE))
        BATCH.extend(batches([[Job(plan, chunk.shape, 0, 0)]], torch.device(DEVICE)))
    rows = torch.zeros(1, 2, 40, 80, device=DEVICE)
    BATCH[0].launch(rows[..., :64], rows[..., :64], None)
    return [rows]


def placed(seed):
    if not PLACEMENT:
        parts = (Part(30, ((0, 0, 2),)), Part(20))
        PLACEMENT.append(Placement.of([draw(1, 2, 30, 2, seed=0), None], parts, columns=2))
    out = torch.full((1, 2, 60, 4), torch.nan, device=DEVICE)
    columns.place_key_columns(out, PLACEMENT[0])
    return [out]


def widened(seed):
    query = draw(1, 4, 70, 64, seed=seed)
    if not WIDENING:
        basis = torch.linalg.qr(draw(1, 2, 64, 5, seed=0))[0].to(torch.bfloat16)
        maps = [QueryMap(16, Rotation(64), basis), QueryMap(16, Rotation(64))]
        bases = stacked_bases(maps, batch=1, heads=2)
        WIDENING.append(columns.widening(query, maps, scale=0.1, width=80, bases=bases))
    return [WIDENING[0](query)]


def attended(seed, *, again=False):
    dtype = torch.float16
    query, keys, values, k, v = (
        draw(1, 2, tokens, 64, seed=seed + n).to(dtype)
        for n, tokens in enumerate((9, 70, 70, 9, 9))
    )
    extra = draw(1, 2, 9, 2, seed=seed), draw(1, 2, 70, 2, seed=seed + 1)
    call = Call(query, Rows(keys, values), Rows(k, v), 0.1, *extra)
    into = None
    if again:
        into = torch.zeros_like(query), torch.full((1, 2, 9), torch.inf, device=DEVICE)
    return attending.attend(call, tile=Tile(16, 32, 4, 2), into=into)


def attended_again(seed):
    return attended(seed, again=True)


def attended_on_hopper(seed):
    if not (DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9):
        pytest.skip("needs a Hopper GPU")
    query, keys, values, k, v = (
        draw(1, 2, tokens, 128, seed=seed + n).bfloat16()
        for n, tokens in enumerate((333, 700, 700, 333, 333))
    )
    extra = draw(1, 2, 333, 2, seed=seed), draw(1, 2, 700, 2, seed=seed + 1)
    return attend(Call(query, Rows(keys, values), Rows(k, v), 0.1, *extra))


@pytest.mark.parametrize(
    "run",
    [
        *(copied, merged, means, few, grouped, steps, decoded, placed, widened),
        *(attended, attended_again, attended_on_hopper),
    ],
)
def test_every_kernel_gives_the_same_when_it_is_kept(run, kept):
    for made in (BATCH, PLACEMENT, WIDENING):
        made.clear()
    run(0)
    before = len(kept)
    got = [x.clone() for x in run(1)]
    assert len(kept) > before
    for made in (BATCH, PLACEMENT, WIDENING):
        made.clear()
    for cache in (module._made, quantizing.planned, columns._placings):
        getattr(cache, "cache_clear", getattr(cache, "clear", None))()
    want = run(1)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
