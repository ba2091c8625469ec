"""Kernels in Gluon on the CPU: their Python runs with tensors in place of ``gl``.

Triton interprets no Gluon. What layouts say is left to the compiler; what is computed is checked:
addresses, instructions (a few of PTX), products. Values that share a register are neighbours along
the last axis.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
import types
from unittest import mock

import torch

SIZES = {
    torch.uint8: 1, torch.int16: 2, torch.int32: 4, torch.int64: 8, torch.float32: 4,
    torch.float16: 2, torch.bfloat16: 2,
}  # fmt: skip


class Pointer:
    def __init__(self, kind):
        self.kind = kind


class Tensor:
    """Numbers, or addresses of numbers of a kind."""

    def __init__(self, x, kind=None):
        self.x, self.kind = x, kind

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    @property
    def shape(self):
        return self.x.shape

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.kind)

    def __getitem__(self, index):
        return Tensor(self.x[index], self.kind)

    def to(self, kind, bitcast=False):
        if isinstance(kind, Pointer):
            return Tensor(self.x, kind.kind)
        if bitcast:
            return Tensor(self.x.contiguous().view(kind))
        return Tensor(self.x.to(kind))

    def _with(self, other, function, back=False):
        y = other.x if isinstance(other, Tensor) else other
        x = self.x
        if self.kind is not None:
            return Tensor(x + torch.as_tensor(y).to(torch.int64) * SIZES[self.kind], self.kind)
        if x.dtype == torch.float32 and isinstance(y, torch.Tensor):
            y = y.float()
        return Tensor(function(y, x) if back else function(x, y))

    def __bool__(self):
        return bool(self.x)

    def __index__(self):
        return int(self.x)


OPERATORS = "add sub mul floordiv mod and or rshift lshift lt gt ge eq truediv"
for name in OPERATORS.split():
    method = f"__{name}__"
    function = getattr(torch.Tensor, method)
    setattr(Tensor, method, lambda a, b, f=function: a._with(b, f))
    if name in ("add", "mul"):
        setattr(Tensor, f"__r{name}__", lambda a, b, f=function: a._with(b, f))
Tensor.__rsub__ = lambda a, b: a._with(b, lambda y, x: y - x, back=True)
Tensor.__rtruediv__ = lambda a, b: a._with(b, lambda y, x: y / x, back=True)
Tensor.__neg__ = lambda a: Tensor(-a.x)


def raw(x):
    return x.x if isinstance(x, Tensor) else torch.as_tensor(x)


def memory(addresses, kind):
    """The numbers between the lowest and the highest address, and places among them."""
    low, high = int(addresses.min()), int(addresses.max())
    size = SIZES[kind]
    buffer = (ctypes.c_char * (high - low + size)).from_address(low)
    return torch.frombuffer(buffer, dtype=kind), (addresses - low) // size


def load(pointer, mask=None, other=0):
    addresses = pointer.x
    keep = torch.ones_like(addresses, dtype=torch.bool)
    if mask is not None:
        keep = raw(mask).expand(addresses.shape)
    out = torch.full(addresses.shape, other, dtype=pointer.kind)
    if keep.any():
        held, places = memory(addresses[keep], pointer.kind)
        out[keep] = held[places]
    return Tensor(out)


def store(pointer, value, mask=None):
    shape = torch.broadcast_shapes(pointer.x.shape, value.x.shape)
    keep = torch.ones(shape, dtype=torch.bool)
    if mask is not None:
        keep = raw(mask).expand(shape)
    held, places = memory(pointer.x.expand(shape)[keep], pointer.kind)
    held[places] = value.x.expand(shape)[keep].to(pointer.kind)


WORD = 0xFFFFFFFF


def pairs(word, kind):
    """Two numbers of 16 bits in a word: [..., 2]."""
    halves = torch.stack([word & 0xFFFF, word >> 16], -1)
    return torch.where(halves >= 1 << 15, halves - (1 << 16), halves).to(torch.int16).view(kind)


def words(halves):
    bits = halves.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    return bits[..., 0] | (bits[..., 1] << 16)


def prmt(a, b, selector):
    both, found = a | (b << 32), torch.zeros_like(a | b | selector)
    both = both.expand(found.shape)
    for byte in range(4):
        shift = ((selector >> (4 * byte)) & 7) * 8
        found = found | (((both >> shift) & 255) << (8 * byte))
    return found


def run_asm(asm, operands):
    """Operands as int64; what is written to $0."""
    names = {f"${number + 1}": value for number, value in enumerate(operands)}

    def value(token):
        if token in names:
            return names[token]
        return torch.tensor(int(token, 0))

    for line in re.sub(r"\.reg[^;]*;", "", asm.strip().strip("{} ")).split(";"):
        if not line.strip():
            continue
        code, rest = line.strip().split(None, 1)
        if code == "mov.b64":
            low, high, source = re.findall(r"[$\w]+", rest)
            names[low], names[high] = value(source) & WORD, (value(source) >> 32) & WORD
            continue
        target, *rest = (part.strip() for part in rest.split(","))
        x = [value(each) for each in rest]
        if code.startswith(("mul.rn.f16x2", "fma.rn.")):
            kind = torch.float16 if "bf" not in code else torch.bfloat16
            a = [pairs(each, kind).double() for each in x]
            found = a[0] * a[1] + (a[2] if len(a) > 2 else 0)
            found = words(found.to(kind))
        else:
            found = {
                "shl.b32": lambda a, b: (a << b) & WORD, "shr.u32": lambda a, b: a >> b,
                "and.b32": lambda a, b: a & b, "xor.b32": lambda a, b: a ^ b,
                "lop3.b32": lambda a, b, c, table: (a & b) | c,
                "mov.b32": lambda a: a, "prmt.b32": prmt,
            }[code](*x)  # fmt: skip
        names[target] = found
    return names["$0"]


def inline_asm(asm, constraints, inputs, dtype, is_pure, pack):
    tensors = torch.broadcast_tensors(*(raw(x) for x in inputs))
    operands = []
    for x in tensors:
        if pack == 2 and SIZES[x.dtype] == 2:
            operands.append(words(x.unflatten(-1, (-1, 2))))
        elif pack == 2:
            operands += [x[..., place::2].to(torch.int64) & WORD if SIZES[x.dtype] == 4
                         else x[..., place::2] for place in (0, 1)]  # fmt: skip
        else:
            operands.append(x.to(torch.int64) & WORD if SIZES[x.dtype] == 4 else x)
    found = run_asm(asm, operands)
    if pack == 2:
        return Tensor(pairs(found, dtype).flatten(-2))
    return Tensor(torch.where(found >= 1 << 31, found - (1 << 32), found).to(dtype))


class Shared:
    def __init__(self, x):
        self.x = x

    def index(self, place):
        return Shared(self.x[int(place)])

    def permute(self, order):
        return Shared(self.x.permute(order))

    def load(self, layout):
        return Tensor(self.x.clone())

    def store(self, tensor):
        self.x.copy_(tensor.x)


def fake_language(program, grid):
    def of(function):
        return lambda *arguments: Tensor(function(*map(raw, arguments)))

    def reduced(function):
        return lambda x, axis: Tensor(function(x.x.float(), axis))

    gl = types.SimpleNamespace(
        constexpr=object, pointer_type=Pointer, load=load, store=store,
        inline_asm_elementwise=inline_asm, static_range=range,
        arange=lambda a, b, layout=None: Tensor(torch.arange(a, b, dtype=torch.int32)),
        zeros=lambda shape, kind, layout=None: Tensor(torch.zeros(shape, dtype=kind)),
        full=lambda shape, x, kind, layout=None: Tensor(torch.full(shape, x, dtype=kind)),
        join=lambda a, b: Tensor(torch.stack([a.x, b.x], -1)),
        split=lambda a: (Tensor(a.x[..., 0]), Tensor(a.x[..., 1])),
        permute=lambda a, order: Tensor(a.x.permute(order)),
        reshape=lambda a, shape: Tensor(a.x.reshape(shape)),
        convert_layout=lambda a, layout, assert_trivial=False: a,
        multiple_of=lambda a, values: a, static_assert=lambda x: None,
        allocate_shared_memory=lambda kind, shape, layout: Shared(torch.empty(shape, dtype=kind)),
        maximum=of(torch.maximum), minimum=of(torch.minimum), abs=of(torch.abs),
        exp2=of(torch.exp2), log2=of(torch.log2),
        where=of(torch.where), max=reduced(lambda x, a: x.amax(a)),
        sum=reduced(lambda x, a: x.sum(a)),
        program_id=lambda axis: Tensor(torch.tensor(program[axis], dtype=torch.int32)),
        num_programs=lambda axis: grid[axis],
    )  # fmt: skip
    for name in ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DistributedLinearLayout",
                 "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout"):  # fmt: skip
        setattr(gl, name, lambda *arguments: None)
    for kind in SIZES:
        setattr(gl, str(kind).removeprefix("torch."), kind)
    return gl


def mma(a, b, acc, use_acc=True, is_async=False):
    found = (a.x.double() @ b.x.double()).float()
    return Tensor(acc.x + found if use_acc else found)


def waited(number, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def copy(target, pointer):
    target.x.copy_(load(pointer).x)


def plain(function):
    """What a decorator of Gluon wraps."""
    return getattr(function, "fn", None) or getattr(function, "__wrapped__", function)


@contextlib.contextmanager
def on_cpu(modules, program, grid):
    """The functions of these modules as Python functions."""
    gl = fake_language(program, grid)
    async_copy = types.SimpleNamespace(commit_group=lambda: None, wait_group=lambda number: None)
    with contextlib.ExitStack() as stack:
        for module in modules:
            changes = {"gl": gl, "async_copy": async_copy, "copy_ahead": copy}
            if hasattr(module, "mma_v2"):
                changes["mma_v2"] = mma
            changes["barrier"] = lambda: None
            if hasattr(module, "warpgroup_mma"):
                changes |= {"warpgroup_mma": mma, "warpgroup_mma_wait": waited}
                changes["fence_async_shared"] = lambda: None
            for name, held in vars(module).items():
                if type(held).__name__ in ("GluonJITFunction", "JITFunction", "ConstexprFunction"):
                    changes[name] = plain(held)
                elif type(held).__name__ == "constexpr":
                    changes[name] = held.value
            stack.enter_context(mock.patch.multiple(module, **changes))
        yield


class Kernel:
    """Stands for a kernel: ``kernel[grid](...)`` runs every program, one after the other."""

    def __init__(self, modules, kernel):
        self.modules, self.function = modules, plain(kernel)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            given = [
                Tensor(torch.tensor(x.data_ptr()), x.dtype)
                if isinstance(x, torch.Tensor)
                else Tensor(torch.tensor(x))
                for x in arguments
            ]
            for program in itertools.product(*map(range, grid)):
                with on_cpu(self.modules, program, grid):
                    self.function(*given, **constants)

        return launch
