"""What becomes of the stock layers of torch.nn, told from the module alone."""

from __future__ import annotations

from torch import nn

_RULES: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Bilinear: "bilinear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding_bag",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm",
    nn.InstanceNorm1d: "instance_norm",
    nn.InstanceNorm2d: "instance_norm",
    nn.InstanceNorm3d: "instance_norm",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.SyncBatchNorm: "batch_norm",
    nn.PReLU: "prelu",
    nn.MultiheadAttention: "multi_head_attention_forward",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNN: "rnn",
    nn.LSTMCell: "lstm_cell",
    nn.GRUCell: "gru_cell",
    nn.RNNCell: "rnn_cell",
}


def expected_of(module: nn.Module, parameter: str) -> tuple[str, str, str]:
    """(status, rule, reason) of a parameter held by `module`."""
    rule = _RULES.get(type(module))
    if rule is None:
        return "unknown", "", f"what {type(module).__name__} does with {parameter} shows when it runs: pass check() a batch of inputs."
    if rule == "batch_norm" and (module.training or not module.track_running_stats):
        return "refused", rule, "statistics of the whole batch: put it into evaluation mode, or clipwise.replace_batchnorm(model)."
    if rule == "instance_norm" and module.track_running_stats and module.training:
        return "refused", rule, "it writes statistics of the examples into buffers: build it with track_running_stats=False."
    if getattr(module, "max_norm", None) is not None or getattr(module, "scale_grad_by_freq", False):
        return "refused", rule, "max_norm and scale_grad_by_freq make one example's gradient depend on others."
    return "exact", rule, ""
