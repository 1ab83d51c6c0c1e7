"""Where the peers' environments and the models are: the folder that `setup_peers.py` fills."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    peers: Path

    @property
    def vllm(self) -> Path:
        """A virtual environment."""
        return self.peers / "vllm"

    @property
    def vllm_python(self) -> Path:
        return self.vllm / "bin" / "python"

    @property
    def vllm_cache(self) -> Path:
        """What vLLM keeps of the models that it compiled."""
        return self.peers / "vllm-cache"

    @property
    def llama(self) -> Path:
        return self.peers / "llama"

    @property
    def llama_sources(self) -> Path:
        return self.llama / "source" / "vendor" / "llama.cpp"

    def llama_tool(self, name: str) -> Path:
        return self.llama / "build" / "bin" / name

    def checkpoint(self, model: str) -> Path:
        return self.peers / "models" / model / "checkpoint"

    def gguf(self, model: str, kind: str) -> Path:
        """`kind` is bf16, or what `llama-quantize` calls a kind of quantised file."""
        return self.peers / "models" / model / f"{kind}.gguf"
