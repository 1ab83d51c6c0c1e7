"""The sizes of the vision-language model, as the configuration that transformers builds it from."""

from __future__ import annotations

from transformers import Qwen3VLConfig

PATCH, MERGE, TEMPORAL = 8, 2, 2
LEAST_PIXELS, MOST_PIXELS = 48 * 48, 72 * 72
LEAST_CLIP_PIXELS, MOST_CLIP_PIXELS = 4 * 48 * 48, 8 * 50 * 50
MAX_LENGTH = 2048


def hf_config(vocabulary: int, ids: dict[str, int]) -> Qwen3VLConfig:
    """The config.json. `ids` names the special tokens: pad, end, image, video, vision_start, vision_end."""
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "max_position_embeddings": MAX_LENGTH,
            "initializer_range": 0.05,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "pad_token_id": ids["pad"],
            "eos_token_id": ids["end"],
            "bos_token_id": None,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL,
            "out_hidden_size": 192,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2],
            "initializer_range": 0.05,
        },
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        eos_token_id=ids["end"],
        pad_token_id=ids["pad"],
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
