"""Hugging Face models in small, with random weights: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import clipwise as cw

WORDS, LENGTH = 37, 7
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SMALL |= {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROTARY = {**SMALL, "num_key_value_heads": 1}


@dataclass(frozen=True)
class Case:
    """`build(dropout)` a model, `batch(B)` its keyword arguments, and one loss an example from both."""

    build: Callable[[float], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]


def ids(batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (batch, length))


def text(batch: int) -> dict[str, Tensor]:
    """Sequences of different lengths, padded on the right."""
    lengths = torch.randint(3, LENGTH + 1, (batch, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids(batch) * mask, "attention_mask": mask}


def pixels(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def causal(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return cw.token_losses(model(**inputs).logits, labels, causal=True)


def masked(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return cw.token_losses(model(**inputs).logits, labels)


def classified(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(logits, inputs[next(iter(inputs))].flatten(1).sum(1).long() % logits.shape[1], reduction="none")


def pair(batch: int) -> dict[str, Tensor]:
    return {**text(batch), "decoder_input_ids": ids(batch, 5)}


def translated(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return cw.token_losses(model(**inputs).logits, inputs["decoder_input_ids"])


def pooled(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output: Any = model(**inputs)
    return output.last_hidden_state.square().flatten(1).mean(1)


def sounds(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 16), "decoder_input_ids": ids(batch, 5)}


def waves(batch: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 160)}


def dropouts(rate: float, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, rate)


BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BART = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
BART |= {
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32, "patch_size": 8}

CASES = {
    "gpt2": Case(
        lambda p: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2, **dropouts(p, "resid_pdrop", "embd_pdrop", "attn_pdrop"))),
        text, causal,
    ),
    "bert": Case(lambda p: hf.BertForMaskedLM(hf.BertConfig(**SMALL, **dropouts(p, *BERT))), text, masked),
    "roberta": Case(lambda p: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SMALL, num_labels=3, **dropouts(p, *BERT))), text, classified),
    "distilbert": Case(
        lambda p: hf.DistilBertForMaskedLM(hf.DistilBertConfig(vocab_size=WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32, pad_token_id=0, **dropouts(p, "dropout", "attention_dropout"))),
        text, masked,
    ),
    "t5": Case(
        lambda p: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=p, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)),
        pair, translated,
    ),
    "bart": Case(lambda p: hf.BartForConditionalGeneration(hf.BartConfig(**BART, **dropouts(p, "dropout", "attention_dropout", "activation_dropout"))), pair, translated),
    "llama": Case(lambda p: hf.LlamaForCausalLM(hf.LlamaConfig(**ROTARY, attention_dropout=p)), text, causal),
    "mistral": Case(lambda p: hf.MistralForCausalLM(hf.MistralConfig(**ROTARY, attention_dropout=p, sliding_window=4)), text, causal),
    "gemma": Case(lambda p: hf.GemmaForCausalLM(hf.GemmaConfig(**ROTARY, head_dim=8, attention_dropout=p)), text, causal),
    "qwen2": Case(lambda p: hf.Qwen2ForCausalLM(hf.Qwen2Config(**ROTARY, attention_dropout=p)), text, causal),
    "opt": Case(
        lambda p: hf.OPTForCausalLM(hf.OPTConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, **dropouts(p, "dropout", "attention_dropout"))),
        text, causal,
    ),
    "gpt-neox": Case(lambda p: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, **dropouts(p, "hidden_dropout", "attention_dropout"))), text, causal),
    "vit": Case(lambda p: hf.ViTForImageClassification(hf.ViTConfig(**VIT, num_labels=3, **dropouts(p, *BERT))), pixels, classified),
    "deit": Case(lambda p: hf.DeiTForImageClassification(hf.DeiTConfig(**VIT, num_labels=3, **dropouts(p, *BERT))), pixels, classified),
    "swin": Case(
        lambda p: hf.SwinForImageClassification(hf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4, num_labels=3, drop_path_rate=0.0, **dropouts(p, *BERT))),
        pixels, classified,
    ),
    "convnext": Case(lambda p: hf.ConvNextForImageClassification(hf.ConvNextConfig(num_channels=3, hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, num_labels=3, drop_path_rate=0.0)), pixels, classified),
    "whisper": Case(
        lambda p: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**{k: v for k, v in BART.items() if k not in ("max_position_embeddings", "forced_eos_token_id")}, num_mel_bins=8, max_source_positions=8, max_target_positions=16, **dropouts(p, "dropout", "attention_dropout"))),
        sounds, translated,
    ),
    "clip text": Case(lambda p: hf.CLIPTextModel(hf.CLIPTextConfig(**SMALL, attention_dropout=p)), text, pooled),
    "clip vision": Case(lambda p: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VIT, attention_dropout=p)), pixels, pooled),
    "wav2vec2": Case(
        lambda p: hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**{k: v for k, v in SMALL.items() if k != "max_position_embeddings"}, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8, feat_extract_norm="layer", mask_time_prob=0.0, apply_spec_augment=False, layerdrop=0.0, num_labels=3, **dropouts(p, "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"))),
        waves, classified,
    ),
    "xlnet": Case(
        lambda p: hf.XLNetForSequenceClassification(hf.XLNetConfig(vocab_size=WORDS, d_model=16, n_layer=2, n_head=2, d_inner=24, num_labels=3, pad_token_id=0, **dropouts(p, "dropout", "summary_last_dropout"))),
        text, classified,
    ),
    "beit": Case(lambda p: hf.BeitForImageClassification(hf.BeitConfig(**VIT, num_labels=3, use_relative_position_bias=True, drop_path_rate=0.0, **dropouts(p, *BERT))), pixels, classified),
    "mixtral": Case(lambda p: hf.MixtralForCausalLM._from_config(hf.MixtralConfig(**ROTARY, num_local_experts=3, num_experts_per_tok=2, attention_dropout=p), experts_implementation="eager"), text, causal),
    "falcon": Case(lambda p: hf.FalconForCausalLM(hf.FalconConfig(**{k: v for k, v in SMALL.items() if k != "intermediate_size"}, **dropouts(p, "hidden_dropout", "attention_dropout"))), text, causal),
    "deberta-v2": Case(
        lambda p: hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"], **dropouts(p, *BERT))),
        text, masked,
    ),
}  # fmt: skip
