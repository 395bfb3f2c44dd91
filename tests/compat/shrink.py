"""A tiny config of any Hugging Face config class: the usual size attributes, whichever of them the class has."""

from __future__ import annotations

import dataclasses
from typing import Any

VOCABULARY = 128
"""Batches draw their tokens from [10, 100); special tokens lie outside."""

_SIZES: dict[int, str] = {
    64: """hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim encoder_hidden_size decoder_hidden_size
        cross_attention_hidden_size max_position_embeddings n_positions max_seq_len n_ctx model_max_length d_inner
        max_target_positions projection_dim attention_hidden_size output_hidden_size max_sequence_length mm_hidden_size
        embedding_dim pooler_output_size pooler_hidden_size lstm_hidden_size transformer_dim lru_width expert_dim
        hidden_size_global prediction_head_size original_max_position_embeddings input_size""",
    128: """intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size
        vocab_size vocab_size_per_layer_input codebook_size text_vocab_size src_vocab_size tgt_vocab_size
        dense_intermediate_size intermediate_size_mlp""",
    32: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size shared_experts_intermediate_size q_lora_rank kv_lora_rank embedding_size
        embedding_hidden_size classifier_proj_size codevector_dim proj_codevector_dim xvector_output_dim rank
        image_size trigram_input_size bottleneck_size channels num_hash_buckets""",
    2: """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers depth
        num_key_value_heads num_kv_heads attention_num_key_value_heads linear_num_key_heads swa_num_key_value_heads
        num_encoder_layers num_experts_per_tok num_experts_per_token moe_topk top_k_experts num_hidden_groups
        n_encoder_layers n_decoder_layers n_encoder_layer n_decoder_layer encoder_num_hidden_layers
        decoder_num_hidden_layers moe_k speech_encoder_layers t2u_encoder_layers t2u_decoder_layers
        num_self_attends_per_block""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_decoder_attention_heads num_encoder_attention_heads num_ngram_heads num_experts num_local_experts
        n_routed_experts moe_num_experts linear_num_value_heads index_n_heads swa_num_attention_heads linear_num_heads
        encoder_num_attention_heads decoder_num_attention_heads speech_encoder_attention_heads
        t2u_encoder_attention_heads t2u_decoder_attention_heads num_conv_pos_embedding_groups block_size
        entity_emb_size mamba_n_heads mamba_num_heads n_mamba_heads n_groups""",
    16: """head_dim d_kv d_head dim_head qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim linear_key_head_dim
        linear_value_head_dim linear_head_dim swa_head_dim kv_channels attention_head_dim global_head_dim rotary_dim
        num_conv_pos_embeddings num_mel_bins max_source_positions max_speech_positions num_buckets seq_length
        query_pre_attn_scalar mamba_chunk_size attention_chunk_size max_2d_position_embeddings
        hidden_size_per_layer_input laurel_rank index_topk num_codevectors_per_group""",
    8: """state_size mamba_d_state ssm_state_size chunk_size window_size patch_size
        attention_window local_attention""",
    12: "sliding_window sliding_window_size attention_window_size",  # a padded row leaves no query without a key
    1: """n_group topk_group num_expert_group num_nextn_predict_layers
        first_k_dense_replace num_dense_layers""",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}
UNSET = {"num_key_value_heads", "head_dim", "n_routed_experts", "num_experts_per_tok", "vocab_size", "num_experts"}
"""Attributes set even where the class leaves them None."""
WIDTHS = (16, 32, 64, 64, 64, 64, 64, 64, 64)
LISTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["depths", "layers", "num_blocks", "depth"], (1,) * 9),
    **dict.fromkeys(["hidden_sizes", "embed_dim", "neck_hidden_sizes", "embed_dims"], WIDTHS),
    **dict.fromkeys(["num_attention_heads", "num_heads"], (2, 2, 4, 4, 4, 4)),
    "image_size": (32, 32, 32),
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "sep_token_id": 3}
DROPOUT = ("dropout", "dropout_prob", "dropout_rate", "pdrop", "drop_rate", "dropout_p")
OFF = (
    "layerdrop",
    "drop_connect_rate",
    "drop_path_rate",
    "drop_path",
    "jitter_noise",
    "mask_time_prob",
    "mask_feature_prob",
    "spec_augment",
)


def shrink(cls: Any, overrides: dict[str, Any] | None = None, dropout: float = 0.0) -> Any:
    """A tiny config of class `cls`; `overrides` go on top, those of a nested config by a dotted name."""
    overrides = overrides or {}
    values: dict[str, Any] = {}
    special = iter(range(100, VOCABULARY))
    for field in dataclasses.fields(cls):
        if not field.init or field.name in ("model_type",):
            continue
        default = field.default if field.default is not dataclasses.MISSING else None
        value = _small(field.name, default, dropout)
        if field.name.endswith(("_token_id", "_token_index", "_index")) and isinstance(default, int):
            value = TOKENS.get(field.name, next(special) if default >= 10 else default)
        if value is not None:
            values[field.name] = value
    for name, sub in (getattr(cls, "sub_configs", None) or {}).items():
        below = {key.partition(".")[2]: value for key, value in overrides.items() if key.startswith(f"{name}.")}
        kind = below.pop("", sub)
        if not dataclasses.is_dataclass(kind) or kind.__name__ in ("AutoConfig", "PreTrainedConfig"):
            kind = type(getattr(cls(), name))
        if dataclasses.is_dataclass(kind):
            values[name] = shrink(kind, below, dropout)
    values |= {key: value for key, value in overrides.items() if "." not in key}
    if "kv_lora_rank" in values and "num_key_value_heads" in values and "num_key_value_heads" not in overrides:
        values["num_key_value_heads"] = values["num_attention_heads"]  # one latent for every head
    config = cls(**values)
    for name, token in TOKENS.items():
        if not hasattr(config, name):
            setattr(config, name, token)
    return config


def _small(name: str, default: Any, dropout: float) -> Any:
    """The tiny value of one attribute, None to leave the class's own."""
    if name.endswith(OFF) and default is not None:
        if isinstance(default, (list, tuple)):
            return [0.0] * len(default)
        return type(default)(0)
    if name.endswith(DROPOUT) and isinstance(default, (int, float)) and not isinstance(default, bool):
        return dropout or type(default)(0)
    if isinstance(default, (list, tuple)):
        return list(LISTS[name][: len(default)]) if name in LISTS else None
    if name in TOKENS:
        return TOKENS[name]
    if isinstance(default, bool | str):
        return None
    if default is None and name not in UNSET:
        return None
    return SIZES.get(name)
