"""Kernels under Triton's interpreter, on a CPU, against float64. On a GPU: test_cuda.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.utils import _pytree as pytree

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU kernels are compiled", allow_module_level=True)

import clipwise as cw
from clipwise import kernels, noise, numerics
from clipwise.compiled.state import State
from clipwise.compiled.trace import trace
from clipwise.factors import Convolution, FactorSum, Geometry, Outer, convolution
from clipwise.factors.inner import gram_kernel_roundoff
from clipwise.kernels.convolution import convolution_gradients
from clipwise.kernels.gram import gram_squares
from clipwise.kernels.noise import noised, plain_normals
from clipwise.kernels.normalization import normalized_sums
from clipwise.kernels.outer import outer_squares
from clipwise.kernels.rows import row_squares
from clipwise.kernels.scaling import kept_rows, scaled_rows, weighted_row_sum
from clipwise.kernels.segments import segment_squares
from clipwise.kernels.terms import masses
from clipwise.randomness import Fast, Reproducible
from test_compiled import MODELS


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("shape", [(3, 1, 7, 5, 9), (2, 2, 40, 33, 70), (1, 1, 1, 1, 1), (4, 3, 17, 64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter does not multiply bf16
def test_norms_of_sums_of_products(shape, tile, dtype):
    examples, blocks, terms, p, d = shape
    left, right = torch.randn(examples, blocks, terms, p).to(dtype), torch.randn(examples, blocks, terms, d).to(dtype)
    found = outer_squares(left, right, tile, False)
    expected = torch.matmul(left.double().mT, right.double()).flatten(1).square().sum(1)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


def test_views_and_extremes():
    """Any strides; numbers whose squares overflow or vanish in float32; an example that is not finite, and no other, is not."""
    left, right = torch.randn(4, 9, 6, 1).permute(0, 3, 2, 1), torch.randn(4, 1, 6, 5)
    left[0] *= 1e30
    left[1] *= 1e-30
    left[2, 0, 3, 4] = torch.inf
    found = outer_squares(left, right, 32, True)
    expected = torch.matmul(left.double().mT, right.double()).flatten(1).square().sum(1)
    torch.testing.assert_close(found[[0, 1, 3]], expected[[0, 1, 3]], rtol=2e-5, atol=0)
    assert not bool(found[2].isfinite())
    zero = outer_squares(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 32, False)
    assert torch.equal(zero, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (4, 1500), (2, 20000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_rows(shape, dtype):
    rows = torch.randn(shape).to(dtype)
    found = row_squares(rows)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, rows.double().square().sum(1), rtol=1e-13, atol=0)
    torch.testing.assert_close(row_squares(rows.t().contiguous().t()), found, rtol=0, atol=0)
    assert torch.equal(torch.ops.clipwise.row_squares(rows), found)


def test_norms_of_rows_neither_overflow_nor_vanish(monkeypatch):
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(numerics, "_WORTH_A_KERNEL", 10)
    rows = torch.randn(5, 3000)
    rows[0] *= 1e30
    rows[1] *= 1e-30
    rows[2, 7] = torch.nan
    rows[3, 2999] = torch.inf
    found = numerics.row_norms(rows)
    torch.testing.assert_close(found[[0, 1, 4]], rows[[0, 1, 4]].double().norm(dim=1), rtol=1e-13, atol=0)
    assert not found[2:4].isfinite().any()


@pytest.mark.parametrize("shape", [(3, 1), (9, 300), (20, 1100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_times_weights_and_their_sum(shape, dtype):
    rows, weights = torch.randn(shape).to(dtype), torch.rand(shape[0])
    weights[1] = 0
    rows[1] = torch.nan
    clean = rows.double()
    clean[1] = 0
    exact = clean * weights.double()[:, None]
    torch.testing.assert_close(scaled_rows(rows, weights, torch.float32), exact.float(), rtol=2e-7, atol=0)
    assert torch.equal(scaled_rows(rows, weights, dtype), (clean.float() * weights[:, None]).to(dtype))
    assert torch.equal(kept_rows(rows, weights), clean.to(dtype))
    assert torch.equal(kept_rows(rows.t().contiguous().t(), weights), clean.to(dtype))
    torch.testing.assert_close(weighted_row_sum(rows, weights).double(), exact.sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.ops.clipwise.weighted_row_sum(rows, weights), weighted_row_sum(rows, weights))
    assert torch.equal(torch.ops.clipwise.scaled_rows(rows, weights, dtype, True), kept_rows(rows, weights))


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("shape", [(3, 7, 5, 9), (2, 40, 33, 70), (1, 1, 1, 1), (2, 150, 8, 3)], ids=str)
def test_norms_by_products_of_terms(shape, tile):
    """Terms on and above the diagonal, and the sum of their norms; never less than it is."""
    examples, terms, p, d = shape
    left, right = (torch.randn(examples, terms, width).half() for width in (p, d))
    left[0, terms // 2 :] *= -1  # some cancel
    squares, mass = gram_squares(left, right, tile)
    expected = torch.einsum("btp,btd->bpd", left.double(), right.double()).flatten(1).square().sum(1)
    exact_mass = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
    assert torch.allclose(squares, expected, rtol=0, atol=1e-6 * float(exact_mass.max()) ** 2)
    assert (mass >= exact_mass).all() and (mass <= 1.0011 * exact_mass).all()
    assert torch.allclose(masses(left, right), exact_mass, rtol=1e-14)


def test_products_too_small_for_float32_are_not_forgotten():
    """⟨left, left⟩ of numbers near 10⁻²⁵ is zero in float32: a bound takes its place. NaN stays NaN, of its own example alone."""
    left, right = torch.full((3, 5, 4), 1e-25), torch.randn(3, 5, 3)
    left[1], left[2, 0, 0] = 1.0, float("nan")
    squares, mass = gram_squares(left, right, 32)
    exact = torch.einsum("btp,btd->bpd", left.double(), right.double()).flatten(1).norm(dim=1)
    assert (
        exact[0] <= squares[0].sqrt() <= 1e-17 and (left[0].double().norm(dim=1) * right[0].double().norm(dim=1)).sum() <= mass[0] <= 1e-17
    )
    assert abs(squares[1] - exact[1] ** 2) <= 2.0**-27 * mass[1] ** 2  # float32 rounds by what cancels, here all but a 25th
    assert squares[2].isnan() and mass[2].isnan()


WINDOWS = {
    "1d": (nn.Conv1d, (2, 3, 9), (3,), dict(stride=2, padding=1)),
    "2d": (nn.Conv2d, (2, 2, 7, 6), (3, 2), dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2))),
    "groups": (nn.Conv2d, (2, 4, 5, 5), (3, 3), dict(padding=1, groups=2)),
    "flat but for its padding": (nn.Conv3d, (1, 2, 1, 5, 5), (1, 3, 3), dict(stride=(3, 1, 1), padding=(1, 1, 1))),
    "several programs": (nn.Conv2d, (2, 3, 13, 12), (5, 3), dict(padding=(2, 1))),
    "3d": (nn.Conv3d, (1, 2, 4, 5, 3), (2, 3, 1), dict(stride=(1, 2, 1), padding=(1, 0, 0))),
    "transposed": (nn.ConvTranspose2d, (2, 2, 4, 3), (3, 2), dict(stride=(2, 3), padding=(1, 0), output_padding=(1, 1))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_of_images(case, dtype, monkeypatch):
    """As a view by strides shows them, whatever the layout of the images; and beyond the edge zero."""
    build, shape, kernel, options = WINDOWS[case]
    transposed = build is nn.ConvTranspose2d
    layer, dims = build(shape[1], 4, kernel, **options), len(kernel)
    x = torch.randn(shape)
    geometry = Geometry(layer.stride, layer.padding, layer.dilation, layer.groups, transposed, layer.output_padding if transposed else ())
    slid, places = (layer(x), x.shape[2:]) if transposed else (x, layer(x).shape[2:])
    slid = slid.detach().to(dtype)
    factor = Convolution.of_rows(layer(x).detach(), x, layer.weight.shape, geometry)
    expected = factor._windows(slid, places)
    monkeypatch.setattr(convolution, "are_available", lambda *_: True)
    for images in (slid, slid.to(memory_format=torch.channels_last) if dims == 2 else slid, torch.stack([slid, slid], -1)[..., 1]):
        assert torch.equal(factor._windows(images, places), expected)
    how = [list(kernel), list(places), *(list(sizes) for sizes in (layer.stride, layer.padding, layer.dilation))]
    assert torch.equal(torch.ops.clipwise.windows_of(slid, *how), expected)
    assert factor._windows(slid[:0], places).shape == (0, *expected.shape[1:])


@pytest.mark.parametrize("shape", [(3, 7, 5, 9), (2, 40, 33, 200), (2, 66, 130, 3)], ids=str)
def test_norms_by_products_of_terms_in_float32_are_within_their_bound(shape):
    """Terms that cancel but for a hundredth, and no more than a little is added. (Triton's interpreter multiplies exactly: what three products of TF32
    leave out, test_cuda.py tries on a GPU.)"""
    examples, terms, p, d = shape
    left, right = torch.randn(examples, terms, p), torch.randn(examples, terms, d)
    left[:, 1::2] = -left[:, : terms - 1 : 2] * (1 + 0.01 * torch.randn(examples, terms // 2, 1))
    right[:, 1::2] = right[:, : terms - 1 : 2]
    factor = Outer(left, right)
    squares, mass = factor.by_gram_kernel(32)
    exact = torch.einsum("btp,btd->bpd", left.double(), right.double()).flatten(1).square().sum(1)
    assert ((squares - exact).abs() <= gram_kernel_roundoff(factor) * mass.square()).all()
    assert gram_kernel_roundoff(factor) < 5e-5


@pytest.mark.parametrize("tile", [64, 128])
def test_large_terms_that_point_against_each_other_are_not_forgotten(tile):
    """Their products fit float32, twice their product does not; and what does not fit is not finite, never zero."""
    one, others = math.sqrt(0.9 * 3.4e38), math.sqrt(0.6 * 3.4e38) / tile
    left, right = torch.zeros(1, 2 * tile, 64), torch.zeros(1, 2 * tile, 64)
    left[0, 0], right[0, 0] = (one / 64) ** 0.5, (one / 64) ** 0.5
    left[0, tile:], right[0, tile:] = -((others / 64) ** 0.5), (others / 64) ** 0.5
    exact = torch.einsum("btp,btd->bpd", left.double(), right.double()).flatten(1).norm(dim=1)
    found = FactorSum([Outer(left, right)]).measured_by(f"gram kernel of {tile}").now().sqrt()
    assert (found >= exact).all() and (found <= 1.01 * exact).all()
    assert not gram_squares(1e10 * left, 1e10 * right, tile)[0].isfinite().any()


@pytest.mark.parametrize("shape", [(3, 70, 5, 9), (2, 33, 70, 4), (1, 1, 1, 1), (2, 40, 3, 1000), (2, 64, 8, 1)], ids=str)
def test_rows_that_share_an_id_are_added_before_they_are_squared(shape):
    """Ids that begin in one stretch of terms and end in another; NaN stays in its example."""
    examples, terms, width, height = shape
    ids, rows = torch.randint(0, height, (examples, terms)), torch.randn(examples, terms, width)
    found = segment_squares(*ids.sort(1), rows)
    table = torch.zeros(examples, height, width, dtype=torch.float64).scatter_add_(1, ids[..., None].expand_as(rows), rows.double())
    assert torch.allclose(found, table.flatten(1).square().sum(1), rtol=1e-6)
    rows[0, 0, 0] = torch.nan
    assert segment_squares(*ids.sort(1), rows).isnan().tolist() == [True] + [False] * (examples - 1)


@pytest.mark.parametrize("is_centred", [True, False])
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 40, 33), (4, 17, 128)], ids=str)
def test_gradients_of_scales_and_shifts(shape, is_centred):
    grad, x = torch.randn(shape), 3 * torch.randn(shape) + 1
    scale, shift = normalized_sums(grad, x, 1e-5, is_centred)
    normalize = F.layer_norm if is_centred else F.rms_norm
    expected = (grad.double() * normalize(x.double(), shape[2:], eps=1e-5)).sum(1)
    assert torch.allclose(scale.double(), expected, atol=1e-5 * shape[1]) and torch.allclose(
        shift.double(), grad.double().sum(1), atol=1e-5
    )
    views = normalized_sums(grad.mT.contiguous().mT, x.transpose(0, 1).contiguous().transpose(0, 1), 1e-5, is_centred)
    assert torch.equal(views, torch.stack([scale, shift]))


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_normalisation_by_a_kernel_gives_the_gradients_of_plain_operations(kind, monkeypatch):
    """Norms, and what a second pass may add, which asks for the mass."""
    monkeypatch.setattr(numerics, "_WORTH_A_KERNEL", 0)
    found = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(kernels, "DEVICES", devices)
        torch.manual_seed(0)
        layer = torch.nn.LayerNorm(6) if kind == "layer_norm" else torch.nn.RMSNorm(6, eps=1e-5)
        torch.nn.init.normal_(layer.weight)
        x = torch.randn(3, 5, 6)
        for method in ("bookkeep", "reweight"):
            with cw.capture(layer) as tape:
                losses = layer(x).square().mul(torch.arange(6)).sum((1, 2))
            found += [cw.clipped_gradients(tape, losses, cw.flat(1.0), method=method)]
    half = len(found) // 2
    for plain, by_kernel in zip(found[:half], found[half:]):
        for name, total in plain.items():
            torch.testing.assert_close(by_kernel[name], total, rtol=1e-5, atol=1e-6)


def test_noise_is_that_of_its_twin():
    """A seed of 63 bits, a length that fills no block, sums in two precisions, rounded once."""
    seed, count = 2**62 + 12345, 5001
    number = lambda value: torch.tensor(value, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        sums = torch.randn(count, dtype=dtype)
        exact = sums.double() * 0.5 + plain_normals(seed, count) * 0.25
        for out in (torch.float64, torch.float32, torch.float16):
            found = torch.full((count,), torch.nan, dtype=out)
            assert noised(sums, torch.tensor(seed), number(0.5), number(0.25), found) is found
            assert torch.allclose(found.double(), exact.to(out).double(), rtol=torch.finfo(out).eps, atol=1e-12)
        noised(sums, torch.tensor(seed), number(0.5), number(0.25), sums)  # in place
        assert torch.allclose(sums.double(), exact.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-12)
    noised(torch.zeros(0), torch.tensor(1), number(1.0), number(1.0), torch.zeros(0))


def test_the_twin_draws_gaussians():
    """The first words of Philox for counter and key zero are published (Random123, kat_vectors); moments, tails, and no number tells another."""
    high, low = (((a >> 5) * 2**26 + (b >> 6)) * 2.0**-53 for a, b in ((0x6627E8D5, 0xE169C58D), (0xBC57AC4C, 0x9B00DBD8)))
    assert abs(float(plain_normals(0, 1)) - math.sqrt(-2 * math.log1p(-high)) * math.cos(2 * math.pi * low)) < 1e-14
    count = 1_000_000
    one, other = plain_normals(2**40 + 7, count), plain_normals(2**40 + 6, count)
    assert 2 * stats.norm.sf(abs(float(one.sum())) / count**0.5) > 1e-4 and stats.kstest(one[:200_000].numpy(), "norm").pvalue > 1e-4
    for a, b in ((one[:-1], one[1:]), (one[:-512], one[512:]), (one, other), (one.square() - 1, other.square() - 1)):
        size = float((a.square().mean() * b.square().mean() * len(a)).sqrt())
        assert 2 * stats.norm.sf(abs(float((a * b).sum())) / size) > 1e-4
    for threshold in (1.0, 3.0, 4.0, 4.5):
        assert stats.binomtest(int((one.abs() > threshold).sum()), count, 2 * stats.norm.sf(threshold)).pvalue > 1e-4


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_step_draws_by_the_kernel(by_kernel, monkeypatch):
    """Rounded once from float64, no number twice, the same for the same seed; parameters without a sum get noise alone."""
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"} if by_kernel else set())
    parameters = [torch.zeros(n).requires_grad_() for n in (30, 700, 1, 2000)]
    sums = [torch.randn(30), None, torch.randn(1), torch.randn(2000)]

    def draw(source, step, sums=sums, **options):
        return noise.noised(sums, parameters, deviation=2.0, divisor=4.0, randomness=source, purpose="noise", step=step, **options)

    values = torch.cat([(found * 4 - (0 if total is None else total)) / 2 for found, total in zip(draw(Reproducible(4), 0), sums)])
    assert len(set(values.tolist())) == len(values) and stats.kstest(values.detach().numpy(), "norm").pvalue > 1e-4
    assert all(map(torch.equal, draw(Reproducible(4), 0), draw(Reproducible(4), 0)))
    assert not torch.equal(draw(Reproducible(4), 0)[1], draw(Reproducible(4), 1)[1]) and not torch.equal(
        draw(Fast(), 0)[1], draw(Fast(), 0)[1]
    )
    room = noise.room_for_sums(parameters)
    for mine, total in zip(room, sums):
        mine.zero_() if total is None else mine.copy_(total)
    places = [mine.data_ptr() for mine in room]
    assert all(map(torch.equal, draw(Reproducible(4), 0, room, in_place=True, apart=False), draw(Reproducible(4), 0)))
    assert [mine.data_ptr() for mine in room] == places and all(map(torch.equal, room, draw(Reproducible(4), 0)))  # written over
    if by_kernel:
        exact = plain_normals(Reproducible(4).seed("noise 0", 0), len(values))
        assert torch.allclose(values.double(), exact, atol=1e-6)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_kernels_that_do_not_run_on_a_device_are_left_out(fault, monkeypatch):
    """A machine without a compiler, say: a message, and plain operations."""
    from clipwise.kernels import rows as rows_module

    def faulty(rows):
        if fault == "raises":
            raise RuntimeError("Failed to find C compiler")
        return torch.zeros(len(rows), dtype=torch.float64)

    device = torch.device("cpu")
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "_found", {})
    monkeypatch.setattr(rows_module, "_run", faulty)
    with pytest.warns(UserWarning, match="find C compiler" if fault == "raises" else "other numbers than torch"):
        assert not kernels.are_available(device, torch.float32)
    assert not kernels.are_available(device, torch.float32)  # without another message
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    assert kernels.are_available(device, torch.float32) and not kernels.are_available(device, torch.float64)


CONVOLUTIONS = {
    "1d": dict(x=(3, 4, 11), w=(6, 4, 3), stride=2, padding=1),
    "2d": dict(x=(2, 3, 9, 8), w=(5, 3, 3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    "2d groups": dict(x=(2, 8, 6, 6), w=(12, 2, 3, 3), padding=1, groups=4),
    "depthwise": dict(x=(2, 6, 5, 5), w=(6, 1, 3, 3), groups=6),
    "pointwise": dict(x=(2, 20, 4, 4), w=(35, 20, 1, 1)),
    "3d": dict(x=(2, 2, 5, 6, 4), w=(3, 2, 2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 1)),
    "wide": dict(x=(2, 20, 7, 7), w=(40, 20, 3, 3), padding=1),
}


@pytest.mark.parametrize(("name", "tile"), [*((name, 16) for name in CONVOLUTIONS), ("2d", 32), ("wide", 32)])
def test_gradients_of_convolution_kernels(name, tile):
    case = dict(CONVOLUTIONS[name])
    dims = len(case["x"]) - 2
    x, w = torch.randn(case.pop("x")), torch.randn(case.pop("w"))
    how = {
        key: [v] * dims if isinstance(v := case.get(key, default), int) else list(v)
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    groups = case.get("groups", 1)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    grad = torch.randn_like(convolve(x, w, **case))
    rows = []
    for i in range(len(x)):
        kernel = w.double().requires_grad_()
        rows.append(torch.autograd.grad(convolve(x[i : i + 1].double(), kernel, **case), kernel, grad[i : i + 1].double())[0])
    expected = torch.stack(rows)
    arguments = (list(w.shape), how["stride"], how["padding"], how["dilation"], groups, tile, False)
    squares, kept = convolution_gradients(grad.unsqueeze(1), x.unsqueeze(1), *arguments, True)
    torch.testing.assert_close(squares, expected.flatten(1).square().sum(1), rtol=2e-5, atol=0)
    torch.testing.assert_close(kept.double(), expected, rtol=2e-4, atol=2e-5)
    alone, nothing = convolution_gradients(grad.unsqueeze(1), x.unsqueeze(1), *arguments, False)
    assert torch.equal(alone, squares) and nothing.numel() == 0


def test_several_images_an_example_in_any_layout():
    x, grad = torch.randn(2, 3, 4, 6, 6), torch.randn(2, 3, 5, 4, 4)
    shape, one = [5, 4, 3, 3], [1, 1]
    expected = torch.stack([
        sum(torch.ops.aten.convolution_backward(grad[i, j, None].double(), x[i, j, None].double(), torch.zeros(shape).double(), None, one, [0, 0], one, False, [0, 0], 1, [False, True, False])[1] for j in range(3))
        for i in range(2)
    ])  # fmt: skip
    channels_last = x.movedim(2, -1).contiguous().movedim(-1, 2)
    for images in (x, channels_last):
        squares, kept = convolution_gradients(grad, images, shape, one, [0, 0], one, 1, 16, False, True)
        torch.testing.assert_close(kept.double(), expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(squares, expected.flatten(1).square().sum(1), rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", ["sequence", "cnn", "class token"])
def test_a_graph_with_kernels_gives_the_numbers_of_plain_operations(name, monkeypatch):
    """Rows are scaled, guarded, measured and added up by kernels wherever a graph allows; a row that is filled up counts for nothing."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x, clipping = build(), torch.randn(10, *shape), cw.flat(0.3)

    def losses_of(model, x):
        return model(x).flatten(1).square().sum(1)

    few = x[:9].clone()
    for _ in range(3):
        with cw.capture(model) as tape:
            losses = losses_of(model, few)
        expected = cw.clipped_gradients(tape, losses, clipping)
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(numerics, "_WORTH_A_KERNEL", 0)
    monkeypatch.setattr(
        "clipwise.planner.MemoryBudget.on", classmethod(lambda cls, device, most=None: cls(0))
    )  # what is kept is not scaled
    x[9] = torch.nan
    state, real = State.of([model]), torch.arange(10) < 9
    leaves, structure = pytree.tree_flatten((x,))
    traced = trace(model, state, losses_of, leaves, structure, real, clipping)
    operators = {str(node.target) for node in traced.graph.graph.nodes}
    assert {"clipwise.row_squares.default", "clipwise.weighted_row_sum.default", "clipwise.scaled_rows.default"} <= operators
    tensors = [tensor.detach() for tensor in state.distinct]
    *sums, _, finite = traced.graph(*tensors, x, real, torch.ones((), dtype=torch.float64))
    assert torch.equal(finite, real)
    for key, total in zip(traced.names, sums, strict=True):
        torch.testing.assert_close(total, expected[key], rtol=1e-3, atol=1e-5)


class Pretended:
    """A kernel of Triton's that notes how it was started."""

    arg_names = ("x", "y", "length", "BLOCK")

    def __init__(self):
        self.looked, self.known = [], []

    def __getitem__(self, grid):
        def first(*arguments, BLOCK, num_warps=4):
            self.looked.append((grid, *arguments, BLOCK))
            return self

        def again(*arguments):
            self.known.append((grid, *arguments))

        return first if len(grid) == 1 else again


def test_a_kernel_is_looked_up_once_for_arguments_of_one_kind():
    from clipwise.kernels.launch import launch

    kernel, x, y = Pretended(), torch.zeros(64), torch.ones(64)

    def count(*arguments, grid=(8,), **constants):
        before = len(kernel.looked)
        launch(kernel, grid, *arguments, **({"BLOCK": 16, "num_warps": 4} | constants))
        return len(kernel.looked) - before

    assert count(x, y, 64) == 1 and count(x, y, 64) == 0
    assert kernel.known == [((8, 1, 1), x, y, 64, 16)]  # all of its parameters, in their order
    assert count(y, x, 64) == 0  # other numbers in memory laid out alike
    assert count(x[1:], y, 64) == 1  # another alignment
    assert count(x.double(), y, 64) == 1
    assert count(x, y, 63) == 1
    assert count(x, y, 64, BLOCK=32) == 1
    assert count(x, y, 64, num_warps=8) == 1
    assert count(x, y, 64, grid=(9,)) == 1
    other = Pretended()
    launch(other, (8,), x, y, 64, BLOCK=16, num_warps=4)
    assert len(other.looked) == 1


def test_numbers_on_their_way():
    from clipwise.streams import OnTheWay

    assert OnTheWay().numbers() == []
    numbers = OnTheWay([torch.tensor(2.0), torch.tensor(0.5, dtype=torch.bfloat16)])
    assert numbers.numbers() == numbers.numbers() == [2.0, 0.5]
