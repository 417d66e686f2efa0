"""Does it pay to weigh the examples inside the clipped product? Σ_n ν_n·left_n ⊗ right_n in bf16, in microseconds. Needs a GPU.

    python benchmarks/fused_scaling.py

scaled, then multiplied   what clipwise does: one pass of rows times weights, then cuBLAS
multiplied alone          cuBLAS on rows that need no weight: the least that any way could take
in one                    a Triton product that weighs rows as it loads them, of several tile sizes the fastest

On an H200 (18 Nov 2026) the third takes two to five times as long as the first but for the head of GPT-2, where it saves 2 %: cuBLAS is that much better at
products than Triton is, and a pass over rows takes a tenth of one. So clipwise has no such kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from clipwise.kernels.scaling import scaled_rows
from clipwise.machine import machine
from report import write_results

CASES = {  # examples, terms, p, d
    "ViT-B/16, B 64: projections": (64, 197, 768, 768),
    "ViT-B/16, B 64: first of two": (64, 197, 3072, 768),
    "ViT-B/16, B 64: second of two": (64, 197, 768, 3072),
    "GPT-2, B 16, T 1024: projections": (16, 1024, 768, 2304),
    "GPT-2, B 64, T 128: first of two": (64, 128, 768, 3072),
    "GPT-2, B 64, T 128: head": (64, 128, 50257, 768),
}
TILES = ((128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4))  # rows, columns, terms at once, warps, stages
PROCESSORS = 132


@triton.jit
def _weighed_product(left, right, weights, out, terms, each, p, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(d, COLUMNS)
    rows, columns = (tile // tiles) * ROWS + tl.arange(0, ROWS), (tile % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(terms, STEP), PARTS) * STEP
    for start in range(part * share, min(part * share + share, terms), STEP):
        n = start + tl.arange(0, STEP)
        inside = n < terms
        weight = tl.load(weights + n // each, mask=inside, other=0.0)[:, None]
        a = tl.load(left + n[:, None].to(tl.int64) * p + rows[None, :], mask=inside[:, None] & (rows < p)[None, :], other=0.0)
        b = tl.load(right + n[:, None].to(tl.int64) * d + columns[None, :], mask=inside[:, None] & (columns < d)[None, :], other=0.0)
        # a row of weight zero counts for nothing, whatever it holds
        a = tl.where(weight != 0, a.to(tl.float32) * weight, 0.0).to(tl.bfloat16)
        acc = tl.dot(tl.trans(a), tl.where(weight != 0, b, 0.0).to(tl.bfloat16), acc)
    tl.store(out + part * p * d + rows[:, None] * d + columns[None, :], acc, mask=(rows < p)[:, None] & (columns < d)[None, :])


def in_one(left: Tensor, right: Tensor, weights: Tensor, tile: tuple[int, ...]) -> Tensor:
    rows, columns, step, warps, stages = tile
    (terms, p), d = left.shape, right.shape[1]
    tiles = triton.cdiv(p, rows) * triton.cdiv(d, columns)
    parts = max(1, PROCESSORS // tiles)
    out = torch.empty(parts, p, d, device=left.device)
    _weighed_product[tiles, parts](
        left, right, weights, out, terms, terms // len(weights), p, d, ROWS=rows, COLUMNS=columns, STEP=step, PARTS=parts, num_warps=warps, num_stages=stages
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this compares kernels of a GPU, and there is none")
    results = {"machine": machine(), "microseconds": {}}
    for name, (examples, terms, p, d) in CASES.items():
        left, right = (torch.randn(examples * terms, width, device="cuda").bfloat16() for width in (p, d))
        weights = torch.rand(examples, device="cuda")
        expected = scaled_then_multiplied(left, right, weights)
        found = {
            "scaled, then multiplied": _microseconds(lambda: scaled_then_multiplied(left, right, weights)),
            "multiplied alone": _microseconds(lambda: torch.mm(left.t(), right, out_dtype=torch.float32)),
        }
        times = []
        for tile in TILES:
            assert float((in_one(left, right, weights, tile) - expected).norm() / expected.norm()) < 1e-4
            times.append(_microseconds(lambda: in_one(left, right, weights, tile)))
        results["microseconds"][name] = found = found | {"in one": min(times)}
        print(f"{name:34s}", ", ".join(f"{way} {time:.1f}" for way, time in found.items()), flush=True)
    write_results("fused_scaling", results)


def scaled_then_multiplied(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    scaled = scaled_rows(left.view(len(weights), -1), weights, torch.bfloat16).view(left.shape)
    return torch.mm(scaled.t(), right, out_dtype=torch.float32)


def _microseconds(run: object) -> float:
    return round(1e3 * triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median"), 1)


if __name__ == "__main__":
    main()
