"""Compile Triton kernels for GPUs that are not there: a driver that only says what it would be.

``with compiled_for(90) as kernels:`` any launch inside compiles the kernel for compute capability
9.0 down to machine code and does not run it; ``kernels`` collects what was compiled.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget

from videokv.kernels.launches import Launches


@contextlib.contextmanager
def compiled_for(capability: int) -> Iterator[list]:
    """Launches become compilations; needs an interpreter-free process (TRITON_INTERPRET unset)."""
    found: list = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.fn.__name__, kernel))
        return kernel

    triton.runtime.driver.set_active(_driver(capability))

    def launched_anew(self, *arguments):
        self._kernel[self._grid](*arguments, **self._constants)

    triton.runtime.jit.JITFunction.run = compile_only
    again, Launches.__call__ = Launches.__call__, launched_anew
    try:
        yield found
    finally:
        triton.runtime.jit.JITFunction.run = run
        Launches.__call__ = again


def _driver(capability: int) -> types.SimpleNamespace:
    target = GPUTarget("cuda", capability, 32)
    return types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cuda,
        map_python_to_cpp_type=lambda name: name,
    )


def _cases() -> dict:
    """Name to a call of each kernel on small CPU tensors."""
    import dataclasses
    from functools import partial

    import pytest
    import test_attend_packed_triton as packed
    import test_attention_triton as attention
    import test_quantize_groups_triton as groups
    import test_reconstruct_triton as reconstruction
    import test_unbiased_triton as unbiased

    from videokv.kernels.assign_centroids import triton as centroids
    from videokv.kernels.assign_centroids import triton_few as few
    from videokv.kernels.assign_centroids import triton_spread, triton_step
    from videokv.kernels.attend import Rows, to_e4m3
    from videokv.kernels.attend.tiles import Tile
    from videokv.kernels.code_repair import triton as coding
    from videokv.kernels.copy_rows import triton as copying
    from videokv.kernels.fit_factor import triton as factors
    from videokv.kernels.merge_tail import triton as merging
    from videokv.kernels.quantize_two_level import triton as two_level
    from videokv.kernels.reconstruct import Rope
    from videokv.kernels.reconstruct.plan import Job, batches
    from videokv.kernels.score_columns import triton as columns
    from videokv.kernels.score_columns.placement import Part, Placement
    from videokv.kernels.subspace_iteration import operands
    from videokv.kernels.subspace_iteration import triton as subspace
    from videokv.noise import QueryMap
    from videokv.rotation import Rotation
    from videokv.tensors import E4M3, GroupFormat

    bf16 = torch.bfloat16
    call = attention.make_call(bf16, size=128, value=128)
    (k, ks), (v, vs) = to_e4m3(call.past.keys), to_e4m3(call.past.values)
    fp8 = dataclasses.replace(call, past=Rows(k, v.mT.contiguous().mT, ks, vs))
    values8 = dataclasses.replace(call, past=Rows(call.past.keys, v.mT.contiguous().mT, None, vs))
    x = groups.draw(1, 2, 67, 128).to(bf16)
    origin, table = x.mean(2, keepdim=True, dtype=torch.float32), x[:, :, :16].float()
    labels = torch.zeros(1, 2, 67, dtype=torch.uint8)
    moment = torch.eye(128).repeat(1, 2, 1, 1)
    directions = operands(torch.ones(1, 2, 128, 8, dtype=bf16), moment)

    def decode(name: str, *, interleaved: bool | None = None) -> None:
        chunk = reconstruction.encoded(name)
        rope = None
        if interleaved is not None:
            table = torch.ones(chunk.shape[2], chunk.shape[3] // 2)
            rope = Rope(table, table, interleaved)
        reconstruction.kernel.reconstruct(
            chunk.parts(), torch.empty(chunk.shape, dtype=bf16), factor=None, rope=rope
        )

    def decode_unbiased(bits: int, size: int, dtype: torch.dtype) -> None:
        chunk = unbiased.encoded(bits, size)
        out = torch.empty(chunk.shape, dtype=dtype)
        reconstruction.kernel.reconstruct(chunk.parts(), out, factor=None)

    def encode_unbiased(bits: int, x: torch.Tensor) -> None:
        size = x.shape[3]
        centres = unbiased.fit_centres(x, bits=4, iterations=1, seed=0)
        _, steps, largest = unbiased.quantize_kernel.quantize(
            x, bits=bits, group_size=size, centres=centres, rotation=Rotation(size)
        )
        unbiased.quantize_kernel.code_steps(steps, largest)

    def few_centres(x: torch.Tensor, bits: int) -> None:
        start = x[:, :, : (1 << bits) - 1].float().contiguous()
        few.few_centres(x, start, iterations=5, bits=bits)

    def decode_narrow() -> None:
        chunk = reconstruction.encoded("quantwm")
        batch, heads, tokens, size = chunk.shape
        turned = torch.empty(batch, heads, size, 64, dtype=E4M3).mT[:, :, :tokens]
        factor = torch.ones(batch, heads, 1, 1)
        reconstruction.kernel.reconstruct(chunk.parts(), turned, factor=factor)

    def decode_many(chunk, *, narrow: bool = False) -> None:
        parts = chunk.parts()
        batch, heads, tokens, size = parts.shape
        dtype = E4M3 if narrow else bf16
        rows = torch.empty(batch, heads, 256, size + 16, dtype=dtype)[..., :size]
        if narrow:
            rows = torch.empty(batch, heads, size, 256, dtype=dtype).mT
        plan = reconstruction.kernel.planned(parts, dtype, rows.device)
        jobs = [Job(plan, parts.shape, n % 2, n * tokens) for n in range(3)]
        factor = torch.ones(batch, heads, 1, 1) if narrow else None
        (many,) = batches([jobs], rows.device)
        many.launch(rows, rows, factor)

    def copy_current() -> None:
        held = torch.empty(1, 67, 2, 128, dtype=bf16).transpose(1, 2)
        keys = torch.empty(1, 2, 67, 144, dtype=bf16)[..., :128]
        copying.copy_rows([(held, keys), (held, torch.empty(1, 2, 67, 128, dtype=bf16))])
        lse = torch.empty(held.shape[:3])
        merging.merge_tail(held, lse, held, lse)

    def packed_words(*, rows: int, dtype: torch.dtype) -> None:
        packed.triton_words.in_pairs = lambda query: query.dtype != torch.float32
        call = packed.by_steps(packed.make_call("rtn", dtype=dtype, queries=rows // 2))
        packed.triton_words.split_attention([call])

    in_gluon = None
    with contextlib.suppress(pytest.skip.Exception):  # another Triton's Gluon
        import test_attend_packed_gluon as in_gluon

    def packed_gluon(name: str, queries: int) -> None:
        call = packed.by_steps(in_gluon.call_of(name, queries=queries, dtype=bf16))
        if in_gluon.triton_unbiased.serves(call):
            in_gluon.triton_unbiased.split_attention(call, fast=True)
        else:
            in_gluon.triton_words.split_attention([call], fast=True)

    def hopper(*, narrow: bool, columns: int) -> None:
        """Only for 9.0, and only where Triton has this Gluon."""
        from test_gluon_attention import make_call

        from videokv.kernels.attend import hopper as kernel

        kernel.attend(make_call(4, 2, 200, 300, 77, columns, narrow=narrow))

    def fit(dtype: torch.dtype, size: int, features: int) -> None:
        queries, true, noisy = (torch.ones(1, 2, 70, size, dtype=dtype) for _ in range(3))
        phi, weights = torch.ones(1, 2, 70, features), torch.ones(1, 2, 70, features)
        factors.fit_factor(queries, true, noisy.float(), phi, weights, scale=0.1)

    tile = Tile(64, 64, 4, 2)
    quantize = partial(groups.kernel.quantize, x)
    return {
        "reconstruct rtn": partial(decode, "rtn2"),
        "reconstruct psac-rotated": partial(decode, "psac-rotated"),
        "reconstruct quantwm": partial(decode, "quantwm"),
        "reconstruct to E4M3, tokens side by side": decode_narrow,
        "reconstruct and turn pairs": partial(decode, "quantwm", interleaved=True),
        "reconstruct and turn halves": partial(decode, "rtn2-odd", interleaved=False),
        **{
            f"reconstruct many {name}": partial(decode_many, reconstruction.encoded(name))
            for name in ("rtn2", "rotated", "centroids", "quantwm", "kivi-keys")
        },
        "reconstruct many unbiased": partial(decode_many, unbiased.encoded(3, 128)),
        "reconstruct many unbiased to E4M3": partial(
            decode_many, unbiased.encoded(2, 128), narrow=True
        ),
        "reconstruct many to E4M3": partial(
            decode_many, reconstruction.encoded("rotated"), narrow=True
        ),
        "copy rows": copy_current,
        "attend": partial(attention.kernel.attend, call, tile=tile),
        "attend again": lambda: attention.kernel.attend(
            call, tile=tile, into=attention.kernel.attend(call, tile=tile)
        ),
        "attend fp8": partial(attention.kernel.attend, fp8, tile=tile),
        "attend values in fp8": partial(attention.kernel.attend, values8, tile=tile),
        **{
            f"attend on Hopper{words}": partial(hopper, narrow=narrow, columns=16)
            for words, narrow in (("", False), (", values in fp8", True))
        },
        "attend on Hopper without columns": partial(hopper, narrow=False, columns=0),
        "score columns": partial(
            columns.widen_query,
            call.query,
            [
                QueryMap(64, Rotation(128), torch.ones(1, 2, 128, 8, dtype=bf16)),
                QueryMap(64, Rotation(128)),
            ],
            scale=0.1,
            width=144,
            bases=torch.ones(1, 1, 2, 8, 128, dtype=bf16),
        ),
        "score columns projected": partial(
            columns.widen_query,
            call.query,
            [QueryMap(64, None, torch.ones(1, 2, 128, 8, dtype=bf16)) for _ in range(6)],
            scale=0.1,
            width=144,
            bases=torch.ones(6, 1, 2, 8, 128, dtype=bf16),
        ),
        **{
            f"score columns of {128 // group} groups": partial(
                columns.widen_query,
                call.query,
                [QueryMap(group, Rotation(128))],
                scale=0.1,
                width=144,
            )
            for group in (32, 128)
        },
        "key columns of a history": partial(
            columns.place_key_columns,
            torch.empty(1, 2, 67, 16, dtype=bf16),
            Placement.of(
                [torch.ones(1, 2, 60, 4, dtype=bf16), None],
                (Part(60, ((2, 0, 4),)), Part(5)),
                columns=6,
            ),
        ),
        "key columns": partial(
            columns.fill_key_columns,
            torch.empty(1, 2, 67, 16, dtype=bf16),
            [(0, torch.ones(1, 2, 67, 4))],
        ),
        "attend_packed": lambda: packed.kernel.attend_packed(packed.make_call("odd64", dtype=bf16)),
        **{
            f"attend_packed words {'wide ' * (rows > 16)}{dtype}": partial(
                packed_words, rows=rows, dtype=dtype
            )
            for rows in (2, 32)
            for dtype in (bf16, torch.float16, torch.float32)
        },
        **{
            f"attend_packed {name} in Gluon, {2 * queries} rows{' (Hopper)' * (queries > 8)}": (
                partial(packed_gluon, name, queries)
            )
            for name, queries in (
                ("rtn", 2),
                ("rtn", 8),
                ("rtn", 32),
                ("symmetric", 2),
                ("symmetric", 32),
                ("unbiased", 2),
                ("unbiased", 8),
                ("unbiased", 32),
                ("small", 2),
                ("small", 32),
                ("labels", 2),
                ("labels", 8),
                ("labels", 32),
            )
            if in_gluon is not None
        },
        "quantize rtn": partial(quantize, format=GroupFormat(2, 32)),
        "quantize kivi": partial(quantize, format=GroupFormat(2, 32, axis="channel")),
        "quantize quarot": partial(quantize, format=GroupFormat(2, 32), rotation=Rotation(128)),
        "assign": partial(centroids.nearest_one, x.float(), origin, table),
        "means": partial(centroids.means, x.float(), origin, labels, table),
        "means of 16 bits": partial(centroids.means, x, origin, labels, table),
        "assign and sum in one pass": partial(
            triton_step.cluster, x, table.repeat(1, 1, 16, 1), iterations=1
        ),
        "code repair": lambda: coding.code_repair(x, x.float(), directions),
        "choose": partial(centroids.choose_by_range, x, table, moment, group_size=64, candidates=4),
        "reconstruct unbiased": partial(decode_unbiased, 3, 128, bf16),
        "reconstruct unbiased 2 bits": partial(decode_unbiased, 2, 128, bf16),
        "reconstruct unbiased float32": partial(decode_unbiased, 2, 80, torch.float32),
        "reconstruct unbiased groups": partial(decode_unbiased, 3, 256, torch.float8_e4m3fn),
        "attend_packed unbiased": lambda: unbiased.attend_kernel.attend_packed(
            unbiased.make_call(size=128, dtype=bf16)
        ),
        "encode unbiased": partial(encode_unbiased, 3, x),
        "encode unbiased float32": partial(encode_unbiased, 2, x[..., :80].float()),
        "assign 16 bits": partial(centroids.nearest_one, x, origin, table),
        "subspace iteration": partial(
            subspace.principal, moment, torch.ones(128, 8, dtype=torch.float64)
        ),
        "starts": partial(triton_spread.spread, x, count=256, seed=0),
        "starts float32": partial(triton_spread.spread, x[..., :80].float(), count=100, seed=0),
        "few starts": partial(few.spread, x, count=15, seed=0),
        "few starts float32": partial(few.spread, x[..., :80].float(), count=7, seed=0),
        "few labels": partial(few_centres, x, 4),
        "few labels of 3 bits": partial(few_centres, x[..., :80].float(), 3),
        "fit factor": partial(fit, bf16, 128, 4),
        "fit factor, a feature a channel": partial(fit, bf16, 128, 128),
        "fit factor float32": partial(fit, torch.float32, 80, 4),
        "two-level": partial(two_level.encode, x, None, group_size=64),
        "two-level repaired": partial(
            two_level.encode, x, None, group_size=64, directions=directions
        ),
    }


def main(capability: int) -> None:
    """Compile everything; a name a line."""
    from videokv.kernels import gpu

    # What a kernel would be asked for on a GPU, though the tensors are on the CPU.
    gpu_products = {torch.float32: "tf32x3"}
    for module in list(sys.modules.values()):
        if getattr(module, "products", None) is gpu.products:
            module.products = lambda dtype, device: gpu_products.get(dtype, "tf32")
    for name, run in _cases().items():
        if capability < 89 and "fp8" in name or capability != 90 and "Hopper" in name:
            continue
        with compiled_for(capability) as found:
            run()
        print(f"{name}: {found[-1][1].metadata.shared} bytes of shared memory", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
