"""Which calls may move or mix rows as the data says, so that what was measured on one batch need not hold for the next.

Where the examples lie is remembered between steps. That is sound for calls whose dependence between rows is the same for any
content: entry-wise functions, reductions along an axis, products that keep the batch apart. Indexing is not such a call
(sorting by length is the identity on one batch and a shuffle on the next), nor is a product with a matrix from the data (a
permutation, an adjacency). A call that is not known to be plain is taken for one that moves rows: then nothing is remembered
and every batch is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .functions import is_mask, without_underscore
from .marks import Marks

PLAIN = set(
    """H T __abs__ __floordiv__ __invert__ __neg__ __pos__ __rdiv__ __rfloordiv__ __rpow__ __rtruediv__ abs absolute acos acosh
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add
    addcdiv addcmul alias all alpha_dropout amax amin aminmax angle any apply_ arange argmax argmin argsort as_tensor asin
    asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm_ batch_norm bernoulli binary_cross_entropy
    binary_cross_entropy_with_logits bincount bitwise_and bitwise_not bitwise_or bitwise_xor bool broadcast_tensors
    broadcast_to byte cauchy ceil celu channel_shuffle clamp clamp_ clamp_max clamp_min clip clone complex conj constant_pad_nd
    contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d copy copysign cos cosh cosine_similarity
    count_nonzero cpu cross cross_entropy cross_entropy_loss ctc_loss cuda cummax cummin cumprod cumsum data deg2rad detach
    detach_ diag_embed diagonal diff digamma div divide dot_product double dropout dropout1d dropout2d dropout3d elu empty
    empty_like eq erf erfc erfinv exp exp2 expand expand_as expm1 exponential eye feature_alpha_dropout feature_dropout fft
    fft2 fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_rfft
    fft_rfft2 fill flatten float floor floor_divide fmax fmin fmod fold fractional_max_pool2d full full_like
    gaussian_nll_loss ge gelu geometric glu greater greater_equal group_norm gru gru_cell gt gumbel_softmax half hardshrink
    hardsigmoid hardswish hardswish_ hardtanh heaviside hfft hinge_embedding_loss histc huber_loss hypot ifft ihfft imag
    index_fill instance_norm int interpolate irfft isclose isfinite isinf isnan item kl_div l1_loss layer_norm le leaky_relu
    lerp less less_equal lgamma linalg_norm linalg_vector_norm linear linspace local_response_norm log log10 log1p log2
    log_normal log_sigmoid log_softmax logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid logsumexp long
    lp_pool1d lp_pool2d lstm lstm_cell lt mH mT map_ masked_fill matrix_norm max max_pool1d max_pool2d max_pool3d max_unpool1d
    max_unpool2d max_unpool3d maximum mean median min minimum mish mode moveaxis movedim mse_loss mul
    multi_head_attention_forward multi_margin_loss nan_to_num nanmean nansum narrow native_group_norm native_layer_norm ne neg
    new_empty new_full new_ones new_tensor new_zeros nll_loss nll_loss_nd norm normal normalize not_equal one_hot ones
    ones_like outer pad permute pin_memory pixel_shuffle pixel_unshuffle poisson_nll_loss polar pow prelu prod quantile rad2deg
    rand rand_like randint randn randn_like random real reciprocal relu relu6 remainder repeat requires_grad_ reshape
    resolve_conj retain_grad rfft rms_norm rms_norm_ rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell round rrelu rsqrt
    rsub scaled_dot_product_attention select selu set_ sgn share_memory_ sigmoid sign signbit silu sin sinc sinh smooth_l1_loss
    soft_margin_loss softmax softmin softplus softshrink softsign special sqrt square squeeze std std_mean sub subtract sum
    swapaxes swapdims t tan tanh tanhshrink tensor threshold tile to trace transpose tril triplet_margin_loss triu true_divide
    trunc type type_as unflatten unfold uniform unsqueeze upsample var var_mean vector_norm view view_as view_as_complex
    view_as_real where xlogy zero zeros zeros_like""".split()
)
_ENTRYWISE = set(
    """add sub subtract rsub mul multiply div divide true_divide floor_divide pow where lerp maximum minimum fmax fmin atan2 hypot fmod
    remainder addcmul addcdiv clamp eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor xlogy
    masked_fill copysign logaddexp heaviside max min __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__
    broadcast_tensors __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __pow__ __mod__ __rmod__""".split()
)
_REPEATS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}  # their argument, perhaps along a new first axis
_ANYWHERE = {"masked_select", "_pack_padded_sequence", "unique", "unique_consecutive", "take", "nonzero", "masked_scatter", "put"}
_ALONG_DIM = {"index_select", "index_copy", "index_add", "index_reduce", "repeat_interleave"}
_ROW_BY_ROW = {"gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce", "sort", "msort", "topk", "kthvalue"}
_SHIFTS = {
    "flip",
    "fliplr",
    "flipud",
    "roll",
    "rot90",
}  # they move rows whatever these hold, but what is then made of both may go by that, or by chance
_INTO_PIECES = {
    "chunk",
    "split",
    "tensor_split",
    "unbind",
    "unsafe_chunk",
    "unsafe_split",
    "vsplit",
    "hsplit",
    "dsplit",
    "split_with_sizes",
}
_OF_PIECES = {
    "cat",
    "concat",
    "concatenate",
    "stack",
    "hstack",
    "vstack",
    "dstack",
    "column_stack",
    "row_stack",
    "pad_sequence",
    "block_diag",
}
_BY_INDEX = {"__getitem__", "__setitem__", "index_put"}
_PRODUCTS = {"matmul", "mm", "mv", "dot", "bmm", "baddbmm", "addmm", "addmv", "addbmm", "cdist", "vdot", "inner", "tensordot", "einsum"}
_ATTENTION = {"scaled_dot_product_attention"}


@dataclass
class Moves:
    """What may depend on content, as lengths of axes: it matters if they may hold the examples, which only the losses tell."""

    unknown: set[str] = field(default_factory=set)  # calls nobody vouched for
    lengths: set[int] = field(default_factory=set)  # axes indexed by something that varies
    axes: set[tuple[int, int]] = field(default_factory=set)  # (axis, length) of functions that keep other axes apart
    pieces: set[int] = field(default_factory=set)  # how many tensors were joined
    contracted: set[tuple[int, int]] = field(default_factory=set)  # (product of the axes kept apart, length of the axis added over)

    def may_move_rows(self, batch: int, row_axes: Iterable[int]) -> bool:
        """Whether examples lying along `row_axes` at the taps may have been moved or mixed as the data said."""
        along = set(row_axes)
        return (
            bool(self.unknown)
            or any(_holds(length, batch) for length in (*self.lengths, *self.pieces))
            or any(axis in along and _holds(length, batch) for axis, length in self.axes)
            or any(_holds(length, batch) and not _holds(apart, batch) for apart, length in self.contracted)
        )

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks, result: Any) -> None:
        """A call on example data."""
        kind = kind_of(name)
        if kind == "entrywise":
            if len(args) + len(kwargs) > 1:
                self._note_broadcast([value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)], marks)
        elif kind == "repeats":
            if isinstance(result, Tensor):
                self._note_broadcast([*(value for value in args[:1] if isinstance(value, Tensor)), result], marks)
        elif kind != "plain":
            self._note_other(name, args, kwargs, marks)

    def _note_other(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks) -> None:
        plain = without_underscore(name)
        if plain in _ATTENTION:
            self._note_attention(args, kwargs)
        elif plain in _BY_INDEX:
            self._note_index(args[0], args[1] if len(args) > 1 else None, marks)
        elif plain == "embedding":
            self._note_lookup(args, marks)
        elif plain in _ROW_BY_ROW | _ALONG_DIM and args and isinstance(args[0], Tensor) and args[0].dim():
            axis = _dim(plain, args, kwargs) % args[0].dim()
            if plain in _ROW_BY_ROW:
                self.axes.add((axis, args[0].shape[axis]))
            elif any(marks.varies(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)):
                self.lengths.add(args[0].shape[axis])
        elif plain in _INTO_PIECES:
            self._note_pieces(plain, args, kwargs)
        elif plain in _SHIFTS:
            self._note_shift(plain, args, kwargs)
        elif plain in _OF_PIECES:
            pieces = args[0] if args else kwargs.get("tensors", ())
            self.pieces.add(len(pieces) if isinstance(pieces, list | tuple) else 0)
        elif plain in _PRODUCTS:
            self._note_product(plain, args, kwargs, marks)
        else:
            self.unknown.add(name)

    def _note_broadcast(self, tensors: list[Tensor], marks: Marks) -> None:
        """An entry-wise function that repeats example data along a new first axis: l (N,) against a mask (U, N) groups by content."""
        if len(tensors) < 2 or (len(tensors) == 2 and tensors[0].shape == tensors[1].shape):
            return
        tensors = [tensor for tensor in tensors if tensor.dim()]
        if len(tensors) < 2:
            return
        widest = max(tensor.dim() for tensor in tensors)
        longest = max(tensor.shape[0] for tensor in tensors if tensor.dim() == widest)
        for tensor in tensors:
            repeated = tensor.dim() < widest or (tensor.shape[0] == 1 and longest > 1)
            if repeated and not tensor.requires_grad and not marks.varies(tensor):
                continue
            if repeated:
                self.lengths.update(tensor.shape[int(tensor.shape[0] == 1 and tensor.dim() > 1) :][:1])

    def _note_index(self, source: Any, index: Any, marks: Marks) -> None:
        """x[order], x[:, order], x[mask]. Several index tensors go together: a fixed one as long as the batch holds the rows in place."""
        if not isinstance(source, Tensor):
            return
        items = index if isinstance(index, tuple) else (index,)
        used = sum(item.dim() if is_mask(item) else 1 for item in items if item is not None and item is not Ellipsis)
        axis = 0
        found: list[int] = []
        fixed: list[int] = []
        for item in items:
            if item is Ellipsis:
                axis += source.dim() - used
                continue
            if item is None:
                continue
            width = item.dim() if is_mask(item) else 1
            plain = isinstance(item, int | slice) or (isinstance(item, Tensor) and not item.dim())
            if not plain:  # a list, an array of numpy's, a range: seen by nobody
                varies = not isinstance(item, Tensor) or marks.varies(item)
                (found if varies else fixed).extend(source.shape[axis : axis + width])
            axis += width
        if not any(length in fixed for length in source.shape[:1]):
            self.lengths.update(found)

    def _note_lookup(self, args: tuple[Any, ...], marks: Marks) -> None:
        """A table that is example data itself: a look-up is an index."""
        self.lengths.update(
            value.shape[0] for value in args if isinstance(value, Tensor) and value.is_floating_point() and marks.varies(value)
        )

    def _note_pieces(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """x.unbind(0), x.split(1): what Python does with the pieces, in which order it joins them, is not seen."""
        source = args[0] if args else next(iter(kwargs.values()))
        place = {"unbind": 1, "vsplit": 9, "hsplit": 9, "dsplit": 9}.get(name, 2)
        default = {"hsplit": 1, "dsplit": 2}.get(name, 0)
        axis = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
        if isinstance(source, Tensor) and source.dim() and isinstance(axis, int):
            self.axes.add((axis % source.dim(), source.shape[axis]))

    def _note_shift(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(source, Tensor):
            return
        rest = args[2:3] if name in ("roll", "rot90") else args[1:]
        given = kwargs.get("dims", rest[0] if len(rest) == 1 else rest)
        dims = {"fliplr": (1,), "flipud": (0,)}.get(name, (given,) if isinstance(given, int) else tuple(given or ()))
        for axis in dims or ((0, 1) if name == "rot90" else range(source.dim())):
            if -source.dim() <= axis < source.dim():
                self.axes.add((axis % source.dim(), source.shape[axis]))

    def _note_product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks) -> None:
        """A product of two tensors from the data, which may be a permutation of rows."""
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        operands += [item for value in args if isinstance(value, list | tuple) for item in value if isinstance(item, Tensor)]
        if sum(tensor.requires_grad or marks.varies(tensor) for tensor in operands) < 2:
            return
        if name in ("einsum", "tensordot", "inner", "addbmm", "vdot", "dot") or any(tensor.dim() < 3 for tensor in operands[-2:]):
            self.lengths.update(size for tensor in operands for size in tensor.shape)
            return
        a, b = operands[-2:]
        self.contracted.add((b.shape[:-2].numel(), b.shape[-2]))
        self.contracted.add((a.shape[:-2].numel(), a.shape[-1]))

    def _note_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[1] if len(args) > 1 else kwargs.get("key")
        if isinstance(key, Tensor):
            self.contracted.add((key.shape[:-2].numel(), key.shape[-2]))


KINDS: dict[str, str] = {}


def kind_of(name: str) -> str:
    """entrywise, repeats, plain, or something to look at more closely; by name, once."""
    known = KINDS.get(name)
    if known is not None:
        return known
    plain = without_underscore(name)
    if plain in _ENTRYWISE:
        kind = "entrywise"
    elif plain in _REPEATS:
        kind = "repeats"
    elif plain in _ATTENTION:
        kind = "other"
    else:
        kind = "plain" if plain in PLAIN or name in PLAIN else "other"
    KINDS[name] = kind
    return kind


def _holds(length: int, batch: int) -> bool:
    return length >= batch and length % batch == 0


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    default = 0 if name == "msort" else -1
    place = 2 if name in ("topk", "take_along_dim", "kthvalue", "repeat_interleave") else 1
    given = kwargs.get("dim", args[place] if len(args) > place else default)
    return given if isinstance(given, int) and not isinstance(given, bool) else default
