"""What is known of torch functions by their names: whether they let rows meet as the data says.

Plain: which rows a row of the result depends on is the same for any content. Entry-wise: plain, unless something is repeated along the rows. The others
that are named need a look at their arguments (`moving.py`). A function that is named nowhere is taken for one that moves rows.
"""

from __future__ import annotations

from .functions import without_underscore

PLAIN = set(
    """H T __abs__ __invert__ __neg__ __pos__ abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d
    adaptive_max_pool3d_with_indices adjoint affine_grid affine_grid_generator alias alias_copy all alpha_dropout amax amin aminmax
    angle any apply arange arccos arccosh arcsin arcsinh arctan arctanh argmax argmin argsort as_tensor asin asinh atan atanh
    atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d batch_norm bernoulli bfloat16 bincount bitwise_not bool byte
    cauchy cdouble ceil celu cfloat chalf channel_shuffle char clone conj conj_physical constant_pad_nd contiguous cos cosh
    count_nonzero cpu cross_entropy cross_entropy_loss ctc_loss cuda cummax cummin cumprod cumsum cumulative_trapezoid data deg2rad
    detach detach_copy diag_embed diagonal diagonal_copy diff digamma dot_product double dropout dropout1d dropout2d dropout3d elu
    empty empty_like erf erfc erfinv exp exp2 expm1 exponential eye fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
    feature_alpha_dropout feature_dropout fft fft2 fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
    fill fill_diagonal fix flatten float floor fold frac fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices frexp frobenius_norm full full_like gelu geometric glu gradient
    grid_sample grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gumbel_softmax half hardshrink hardsigmoid
    hardswish hardtanh hfft histc i0 ifft ihfft imag instance_norm int interpolate irfft isfinite isinf isnan isneginf isposinf
    isreal istft item layer_norm leaky_relu lgamma linalg_diagonal linalg_norm linalg_vector_norm linspace local_response_norm log
    log10 log1p log2 log_normal log_sigmoid log_softmax logcumsumexp logical_not logit logsigmoid logsumexp long lp_pool1d lp_pool2d
    lp_pool3d lstm lstm_cell mH mT map matrix_norm max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d mean median mish mode moveaxis movedim
    multi_head_attention_forward multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss mvlgamma nan_to_num nanmean
    nanmedian nanquantile nansum native_channel_shuffle native_dropout native_group_norm native_layer_norm neg negative new_empty
    new_full new_ones new_tensor new_zeros nll_loss nll_loss_nd norm normal normalize one_hot ones ones_like pad permute
    permute_copy pin_memory pixel_shuffle pixel_unshuffle polygamma positive prelu prod quantile rad2deg rand rand_like randint
    randn randn_like random ravel real reciprocal relu relu6 reshape reshape_as resolve_conj resolve_neg retain_grad rfft rms_norm
    rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell round rrelu rsqrt select select_copy selu set sgn share_memory short sigmoid sign
    signbit silu sin sinc sinh slice_copy softmax softmin softplus softshrink softsign special special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf special_erfc special_erfcx
    special_erfinv special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e
    special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri
    special_polygamma special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_sinc
    special_softmax special_spherical_bessel_j0 sqrt square squeeze squeeze_copy std std_mean stft sum sum_to_size swapaxes swapdims
    t t_copy tan tanh tanhshrink tensor threshold to trace transpose transpose_copy trapezoid trapz tril triu trunc type type_as
    unflatten unfold unfold_copy uniform unsqueeze unsqueeze_copy upsample var var_mean vector_norm view view_as view_as_complex
    view_as_complex_copy view_as_real view_as_real_copy view_copy zero zeros zeros_like""".split()
)
ENTRYWISE = set(
    """add sub subtract rsub mul multiply div divide true_divide floor_divide pow float_power where lerp maximum minimum fmax fmin
    atan2 arctan2 hypot fmod remainder addcmul addcdiv clamp clamp_max clamp_min clip eq ne not_equal lt less le less_equal gt
    greater ge greater_equal isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift xlogy masked_fill copysign logaddexp logaddexp2 heaviside max min gcd lcm igamma igammac ldexp nextafter
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ complex polar copy __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __iand__ __ior__
    __ixor__ __lshift__ __rshift__ __rlshift__ __rrshift__ __ilshift__ __irshift__ broadcast_tensors __add__ __radd__ __iadd__
    __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __div__ __rdiv__ __idiv__ __truediv__ __rtruediv__ __floordiv__
    __rfloordiv__ __ifloordiv__ __pow__ __rpow__ __mod__ __rmod__ __imod__ linalg_cross linalg_vecdot pairwise_distance
    cosine_embedding_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss special_gammainc special_gammaincc
    special_xlog1py special_xlogy special_zeta binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity cross
    gaussian_nll_loss huber_loss kl_div l1_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss""".split()
)
REPEATS = {"expand", "expand_as", "broadcast_to", "expand_copy", "repeat", "tile"}  # their argument, perhaps along a new first axis
ALONG_DIM = {"index_select", "index_copy", "index_add", "index_fill", "index_reduce", "repeat_interleave"}
ROW_BY_ROW = set("gather take_along_dim scatter scatter_add scatter_reduce sort msort topk kthvalue searchsorted".split())
SHIFTS = {
    "flip",
    "fliplr",
    "flipud",
    "roll",
    "rot90",
}  # they move rows whatever these hold, but what is then made of both may go by that, or by chance
INTO_PIECES = set("chunk split tensor_split unbind unsafe_chunk unsafe_split vsplit hsplit dsplit split_with_sizes".split())
OF_PIECES = set("cat concat concatenate stack hstack vstack dstack column_stack row_stack pad_sequence block_diag".split())
BY_INDEX = {"__getitem__", "__setitem__", "index_put"}
PRODUCTS = set(
    """matmul __matmul__ __rmatmul__ linalg_matmul mm mv dot bmm baddbmm addmm addmv addbmm cdist vdot inner outer ger tensordot einsum chain_matmul
    linalg_multi_dot""".split()
)
MATRICES = set(  # they keep all axes apart but the last two
    """det logdet slogdet inverse pinverse cholesky cholesky_inverse cholesky_solve matrix_exp matrix_power nuclear_norm qr svd linalg_cholesky linalg_cholesky_ex
    linalg_cond linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lu linalg_lu_factor linalg_lu_solve linalg_matrix_exp linalg_matrix_norm
    linalg_matrix_power linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals
    triangular_solve""".split()
)
ATTENTION = {"scaled_dot_product_attention"}
BY_WEIGHTS = set(  # plain, where the second argument is a weight
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution bilinear".split()
)

KINDS: dict[str, str] = {}


def kind_of(name: str) -> str:
    """entrywise, repeats, plain, or something to look at more closely; by name, once."""
    known = KINDS.get(name)
    if known is not None:
        return known
    plain = without_underscore(name)
    if plain in ENTRYWISE:
        kind = "entrywise"
    elif plain in REPEATS:
        kind = "repeats"
    elif plain in ATTENTION:
        kind = "other"
    else:
        kind = "plain" if plain in PLAIN else "other"
    KINDS[name] = kind
    return kind
