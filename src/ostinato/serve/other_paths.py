"""Paths of other engines' servers, and what takes their place here."""

from __future__ import annotations

_NO_ADAPTERS = "none, as adapters are not supported; merge them into the checkpoint"
_NO_RERANKERS = "none, as there are no classifiers and no rerankers; vectors of `POST /v1/embeddings` can be compared"
_STAYS = "none, as a server has one model, which stays loaded"
PATHS = {
    "vllm": {
        "`GET /health`": "/ping",
        "`GET /metrics`": "/load",
        "`GET /plan`, and `/about`": "/server_info",
        "`POST /v1/completions` or `/v1/chat/completions`": "/inference/v1/generate /invocations",
        "`POST /v1/embeddings`": "/pooling",
        "`POST /reset_prefix_cache`": "/reset_mm_cache /reset_encoder_cache",
        "`ostinato bench profile MODEL`": "/start_profile /stop_profile",
        "none, as sounds are not read": "/v1/audio/transcriptions /v1/audio/translations /v1/realtime",
        _NO_RERANKERS: "/score /v1/score /rerank /v1/rerank /v2/rerank /classify",
        _NO_ADAPTERS: "/v1/load_lora_adapter /v1/unload_lora_adapter",
        _STAYS: "/sleep /wake_up /is_sleeping",
    },
    "llama-cpp": {
        "`GET /health`": "/v1/health",
        "`GET /metrics`": "/slots",
        "`GET /plan`, and `/about`": "/props",
        "`GET /v1/models`": "/models",
        "`POST /v1/completions`": "/completion /completions",
        "`POST /v1/embeddings`": "/embedding /embeddings",
        "`POST /tokenize`, with messages": "/apply-template",
        "none, as a prompt is only continued at its end": "/infill",
        _NO_RERANKERS: "/reranking /v1/reranking",
        _NO_ADAPTERS: "/lora-adapters",
        _STAYS: "/models/load /models/unload",
    },
    "others": {
        "`GET /health`": "/healthz /ready /livez /health_generate",
        "`GET /plan`, and `/about`": "/info /get_model_info /model_info /get_server_info",
        "`POST /v1/completions` or `/v1/chat/completions`": "/generate /generate_stream",
        "`POST /v1/embeddings`": "/embed /encode",
        "`POST /reset_prefix_cache`": "/flush_cache",
        "`ostinato batch IN.jsonl OUT.jsonl`": "/v1/files /v1/batches",
        "none, as text is all that is made": "/v1/images/generations /v1/images/edits /v1/audio/speech",
    },
}
"""Program -> what takes the place of its server's paths here -> those paths."""


def advice_on_path(path: str) -> str | None:
    """Return what to ask in place of another engine's path; None if it is unknown too."""
    here = next((here for table in PATHS.values() for here, paths in table.items() if path in paths.split()), None)
    return None if here is None else here.replace("`", "")
