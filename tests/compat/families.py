"""Every Hugging Face family that builds offline, tiny, with its usual head and loss, and families written by hand.

The families come from transformers' own auto mappings, one head for each model type; `python -m tests.compat.families`
lists them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.compat import handwritten, mixers
from tests.compat.shrink import shrink

ROWS, LENGTH, IMAGE, CLASSES = 4, 16, 32, 4
LENGTHS = (16, 13, 9, 5)
"""How much of each row of 16 a padded batch keeps; other lengths in proportion."""


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    kind: str
    build: Callable[..., LightningModule]
    """Seeded by the caller; `dropout=` for a model with dropout."""
    batch: Callable[[int, bool], Any]
    """(seed, padding) to a batch of 4 rows; None where padding is asked of a family that takes no mask."""


@dataclasses.dataclass(frozen=True)
class Head:
    mapping: str
    kind: str
    labels: str


# A family with several heads has the first of these.
HEADS = (
    Head("SEQ_TO_SEQ_CAUSAL_LM", "encoder-decoder", "tokens"),
    Head("SPEECH_SEQ_2_SEQ", "speech", "text"),
    Head("MASKED_LM", "encoder", "tokens"),
    Head("CAUSAL_LM", "decoder", "tokens"),
    Head("CTC", "speech", "text"),
    Head("IMAGE_CLASSIFICATION", "vision", "class"),
    Head("AUDIO_CLASSIFICATION", "speech", "class"),
    Head("SEMANTIC_SEGMENTATION", "vision", "map"),
    Head("SEQUENCE_CLASSIFICATION", "encoder", "class"),
    Head("ZERO_SHOT_IMAGE_CLASSIFICATION", "vision", "pairs"),
)


class Step(LightningModule):
    """A Hugging Face model trained as people do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MIXED = ["linear_attention", "full_attention"]
QWEN4 = {
    "layer_types": MIXED,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": MIXED},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "granitemoehybrid": {"layer_types": MIXED},
    "kimi_linear": {"layer_types": MIXED},
    "lfm3": {"num_hidden_layers": 3},
    "qwen3_5": {"text_config.layer_types": MIXED},
    "qwen3_5_moe": {"text_config.layer_types": MIXED},
    "qwen4_exp": {f"text_config.{key}": value for key, value in QWEN4.items()},
    "qwen4_exp_text": QWEN4,
    "qwen3_5_text": {"layer_types": MIXED},
    "qwen3_5_moe_text": {"layer_types": MIXED},
    "qwen3_next": {"layer_types": MIXED},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
    },
    "gemma4_unified_assistant": {"text_config.num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2},
    "encoder-decoder": {"decoder.is_decoder": True, "decoder.add_cross_attention": True},
    "flint": {"mlp_only_layers": [0]},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "cpmant": {"dim_ff": 128, "prompt_length": 4},
    "roc_bert": {"shape_vocab_size": 128, "pronunciation_vocab_size": 128},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "feed_forward_size": 128,
        "local_attn_chunk_length": 8,
        "attention_head_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    "esmc": {"num_key_value_heads": 4},
    "dots3_note": {"text_config.num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "squeezebert": {"embedding_size": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "granite_speech5_ctc": {"encoder_config.context_size": 8, "encoder_config.num_key_value_heads": 4},
    "speech_to_text": {"conv_channels": 64, "input_feat_per_channel": 16},
    "convnext": {"patch_size": 2},
    "convnextv2": {"patch_size": 2},
    "swin": {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]},
    "swinv2": {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]},
    "donut-swin": {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]},
    "focalnet": {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [32, 64]},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilevitv2": {"patch_size": 2, "width_multiplier": 0.25, "n_attn_blocks": [1, 1, 1]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "siglip2": {"vision_config.num_patches": 16},
    "lilt": {"max_2d_position_embeddings": 1024, "hidden_size": 48},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 128},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "dots1": {"n_shared_experts": 1, "moe_intermediate_size": 32},
    "got_ocr2": {"vision_config.output_channels": 16, "vision_config.mlp_dim": 128},
    "qwen3_asr": {"audio_config.downsample_hidden_size": 16, "audio_config.output_dim": 64},
    "perceiver": {
        "max_position_embeddings": 16,
        "d_latents": 64,
        "num_latents": 8,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 64,
    },
    "dia": {"decoder_config.cross_hidden_size": 64, "decoder_config.cross_head_dim": 16},
    "gemma4_unified": {"vision_config.mm_embed_dim": 64, "vision_config.mm_posemb_size": 16},
    "hgnet_v2": {
        "hidden_sizes": [32, 48, 48, 64],
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 32, 48, 48],
        "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [32, 48, 48, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "hiera": {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "embed_dim_multiplier": 2.0, "num_query_pool": 1},
    "videoprism": {"vision_config.num_frames": 2, "vision_config.tubelet_size": [1, 8, 8]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "cvt": {"depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0], "embed_dim": [16, 32, 64], "num_heads": [1, 2, 4]},
    "textnet": {"stem_out_channels": 16},
    "levit": {"patch_size": 16},
    "align": {"projection_dim": 80, "vision_config.hidden_dim": 64, "vision_config.width_coefficient": 0.25},
    "upernet": {
        "hidden_size": 32,
        "auxiliary_channels": 16,
        "auxiliary_in_channels": 64,
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 64],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    },
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12, "input_size": 32, "max_2d_position_embeddings": 1024},
    "audio-spectrogram-transformer": {"max_length": 32, "time_stride": 8, "frequency_stride": 8},
    "canine": {"local_transformer_stride": 8, "max_position_embeddings": 64},
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "fusion_hidden_size": 32,
    },
    "phi4_multimodal": {
        "vision_config.image_size": 32,
        "vision_config.crop_size": 32,
        "audio_config.ext_pw_out_channel": 64,
        "audio_config.depthwise_separable_out_channel": 64,
        "audio_config.nemo_conv_channels": 16,
        "audio_config.num_blocks": 2,
    },
}


def _image(generator: torch.Generator, size: int = IMAGE) -> Tensor:
    return torch.randn(ROWS, 3, size, size, generator=generator)


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(10, 100, (ROWS, length), generator=generator)


def _patches(g: torch.Generator) -> dict[str, Tensor]:
    """Siglip 2 takes an image already cut, and how many patches each has."""
    shapes = torch.full((ROWS, 2), 4)
    ones = torch.ones(ROWS, 16, dtype=torch.long)
    return {
        "pixel_values": torch.randn(ROWS, 16, 192, generator=g),
        "spatial_shapes": shapes,
        "pixel_attention_mask": ones,
    }


RANDOM: dict[str, str] = {"dpt": "its auxiliary head has a dropout of 0.1 that no attribute sets"}
"""Families whose step draws random numbers even with dropout at 0: seed before each."""
INPUTS: dict[str, Callable[[torch.Generator], dict[str, Tensor]]] = {
    "git": lambda g: {"input_ids": _tokens(g), "pixel_values": _image(g)},
    "perceiver": lambda g: {"inputs": _tokens(g)},
    "siglip2": _patches,
    "audio-spectrogram-transformer": lambda g: {"input_values": torch.randn(ROWS, 32, 16, generator=g)},
    "granite_speech5_ctc": lambda g: {"input_features": torch.randn(ROWS, 32, 64, generator=g)},
    "whisper": lambda g: {"input_features": torch.randn(ROWS, 16, 32, generator=g)},
    "lasr_ctc": lambda g: {"input_features": torch.randn(ROWS, 128, 16, generator=g)},
    "parakeet_ctc": lambda g: {"input_features": torch.randn(ROWS, 128, 16, generator=g)},
    "mobilevitv2": lambda g: {"pixel_values": _image(g, 64)},
    "videoprism": lambda g: {
        "input_ids": _tokens(g),
        "pixel_values_videos": torch.randn(ROWS, 2, 3, 32, 32, generator=g),
    },
}
UNMASKED = {"audio-spectrogram-transformer", "whisper"}  # their attention_mask is of patches, or for augmentation
ALWAYS_MASKED = {"lasr_ctc", "parakeet_ctc", "granite_speech5_ctc"}
FLOAT32: dict[str, str] = {
    "longformer": "NaN gradients with padding",
    "led": "NaN gradients with padding",
    "xglm": "fills a mask with float64's lowest number through a float32 scalar",
    "fsmt": "fills a mask with float64's lowest number through a float32 scalar",
    "mra": "its attention works in float32 and does not go back",
    "inkling2_text": "its router casts the tokens to float32",
    "inkling2_loop_text": "its router casts the tokens to float32",
    "canine": "NaN loss",
    "prophetnet": "NaN loss with padding",
}
"""Families whose step the library itself cannot take in float64."""
HEAD_OF = {
    "reformer": "CAUSAL_LM",
    "speecht5": "SPEECH_SEQ_2_SEQ",
    **dict.fromkeys(("clip", "siglip", "metaclip_2"), "ZERO_SHOT_IMAGE_CLASSIFICATION"),
}
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "needs the package timm (its text tower is gemma3n_text)",
    "xlstm": "its own chunkwise kernel fails in the backward pass: it changes in place what autograd saved",
    "timm_wrapper": "needs the package timm",
    "dinat": "needs the package natten",
    "layoutlmv2": "needs the package detectron2",
    "pp_lcnet": "its image classification head returns no loss",
    "blip-2": "its image-text retrieval head returns no loss",
    "shieldgemma2": "its head keeps Gemma 3's token loss, which labels of classes do not fit (gemma3 is here)",
    "dots3_note": "left out: its per-layer settings do not fit two layers (its text tower is dots3_note_text)",
    "gemma4_assistant": "left out: its checks refuse the shrunk text config",
    "gemma4_unified_assistant": "left out: its layers share keys and values, which two layers cannot",
    "musicgen": "left out: composed of three models, one a codec",
    "musicgen_melody": "left out: composed of three models, one a codec",
    "nemo_speechlm": "left out: its check of the towers' sizes refuses the shrunk config",
    "voxtral_realtime": "left out: takes audio with the text",
    "dia": "left out: labels of several codebooks, other than a row of tokens",
    "fun_asr_nano": "left out: its check of the adaptor's size refuses the shrunk config",
    "kyutai_speech_to_text": "left out: its codec's groups do not fit the shrunk sizes",
    "speech-encoder-decoder": "left out: composed of two models, neither of them shrunk",
    "vibevoice": "left out: labels of the whole prompt with speech inside",
    "vibevoice_asr": "left out: 172M parameters, its codec is not shrunk",
    "sapiens2": "left out: its head has no default sizes",
    "tipsv2_dpt": "left out: its neck is tied to the backbone's layers, not shrunk",
}
"""A missing package, a head with no loss or a bug of the library's; `left out` where the shrinking stops short."""


@functools.cache
def model_class(name: str, mapping: str) -> Any:
    names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")[name]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def build(name: str, head: Head, dropout: float = 0.0) -> LightningModule:
    cls = model_class(name, head.mapping)
    config = shrink(CONFIG_MAPPING[name], OVERRIDES.get(name), dropout)
    config._experts_implementation = "eager"  # the default's grouped_mm is not there in float64
    if type(config) is not cls.config_class and isinstance(config.get_text_config(), cls.config_class):
        config = config.get_text_config()
    return Step(cls(config))


def batch(name: str, head: Head, seed: int, padding: bool) -> dict[str, Any] | None:
    cls = model_class(name, head.mapping)
    parameters = inspect.signature(cls.forward).parameters
    if padding and (
        name in UNMASKED
        or "attention_mask" not in parameters
        or (cls.main_input_name == "pixel_values" and head.labels != "pairs")
    ):
        return None
    generator = torch.Generator().manual_seed(seed)
    main = cls.main_input_name
    values: dict[str, Any] = {}
    if name in INPUTS:
        values = INPUTS[name](generator)
    elif main == "input_ids":
        values = {"input_ids": _tokens(generator)}
    elif main == "pixel_values":
        values = {"pixel_values": _image(generator)}
    elif main == "input_values":
        values = {"input_values": torch.randn(ROWS, 1280, generator=generator)}
    elif main == "input_features":
        values = {"input_features": torch.randn(ROWS, 32, 16, generator=generator)}
    if head.labels == "tokens":
        values["labels"] = values[main].clone() if head.kind == "decoder" else _tokens(generator)
    elif head.labels == "text":
        values["labels"] = _tokens(generator, 6)
    elif head.labels == "class":
        values["labels"] = torch.randint(0, 2, (ROWS,), generator=generator)
    elif head.labels == "map":
        values["labels"] = torch.randint(0, 2, (ROWS, IMAGE, IMAGE), generator=generator)
    else:
        if name not in INPUTS:
            values["pixel_values"] = _image(generator)
        values |= {"input_ids": _tokens(generator), "return_loss": True}
    if padding:
        _pad(values, main)
    elif name in ALWAYS_MASKED:
        values["attention_mask"] = torch.ones(values[main].shape[:2], dtype=torch.long)
    return values


def _pad(values: dict[str, Any], main: str) -> None:
    """Ragged padding on the right, -100 in the labels there."""
    main = main if main in values and values[main].dim() < 4 else "input_ids"
    length = values[main].size(1)
    kept = torch.tensor([length * part // LENGTHS[0] for part in LENGTHS])
    mask = torch.arange(length) < kept[:, None]
    values["attention_mask"] = mask.long()
    values[main] = values[main] * (mask if values[main].dim() == 2 else mask[..., None])
    labels = values.get("labels")
    if labels is not None and labels.shape == mask.shape:
        values["labels"] = labels.masked_fill(~mask, -100)


@functools.cache
def discovered() -> dict[str, Head]:
    heads: dict[str, Head] = {}
    for head in HEADS:
        for name in getattr(modeling_auto, f"MODEL_FOR_{head.mapping}_MAPPING_NAMES"):
            if HEAD_OF.get(name, head.mapping) == head.mapping:
                heads.setdefault(name, head)
    return heads


MOE: frozenset[str] = frozenset(
    [
        "afmoe",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "cohere2_moe",
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "dots3_note_text",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "inkling2_text",
        "inkling_text",
        "jamba",
        "jetmoe",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lfm2_moe",
        "llama4",
        "llama4_text",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "mistral4",
        "mixtral",
        "nemotron_h",
        "nllb-moe",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "solar_open",
        "switch_transformers",
        "zaya",
    ]
)
"""Families with experts in their tiny form."""
FAMILIES: dict[str, Family] = {
    name: Family(
        name,
        "moe" if name in MOE else head.kind,
        functools.partial(build, name, head),
        functools.partial(batch, name, head),
    )
    for name, head in discovered().items()
    if name not in UNBUILDABLE
}


def _handwritten(name: str) -> Family:
    kind, model, batches = BY_HAND[name]
    return Family(name, kind, lambda dropout=0.0: handwritten.Handwritten(model(dropout)), batches)


BY_HAND = {**handwritten.MODELS, **mixers.MODELS}
FAMILIES |= {name: _handwritten(name) for name in BY_HAND}


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name in FLOAT32 else torch.float64


def to(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The batch with its floating inputs in `dtype`."""
    real = {key for key, value in batch.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {key: value.to(dtype) if key in real else value for key, value in batch.items()}


def step(module: LightningModule, batch: dict[str, Any], seed: int = 0) -> Tensor:
    """One training step outside a trainer, its gradients in the parameters."""
    torch.manual_seed(seed)
    module.log = lambda *arguments, **options: None  # type: ignore[method-assign]
    loss = module.training_step(batch, 0)
    module.zero_grad()
    loss.backward()
    return loss


def main() -> None:
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    print(f"{'family':30}{'kind':17}{'parameters':>11}{'loss':>10}{'padded':>10}{'seconds':>9}")
    for name, family in sorted(FAMILIES.items(), key=lambda item: (item[1].kind, item[0])):
        start = time.perf_counter()
        torch.manual_seed(0)
        module = family.build().to(dtype_of(name))
        batches = (family.batch(0, padding) for padding in (False, True))
        losses = ["-" if b is None else f"{step(module, to(b, dtype_of(name))):.4f}" for b in batches]
        count = sum(parameter.numel() for parameter in module.parameters())
        seconds = time.perf_counter() - start
        print(f"{name:30}{family.kind:17}{count:11,}{losses[0]:>10}{losses[1]:>10}{seconds:9.2f}", flush=True)
    kinds = collections.Counter(family.kind for family in FAMILIES.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"\n{len(FAMILIES)} families in {time.perf_counter() - began:.0f} s: {counts}")
    for title, reasons in (("Not here", UNBUILDABLE), ("In float32 only", FLOAT32), ("Random", RANDOM)):
        print(f"\n{title}:", *(f"  {name:28}{reason}" for name, reason in sorted(reasons.items())), sep="\n")


if __name__ == "__main__":
    main()
