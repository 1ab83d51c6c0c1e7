"""`/v1/completions`."""

from __future__ import annotations

from pydantic import Field

from ostinato.serve.protocol.common import Generating


class CompletionRequest(Generating):
    prompt: str | list[int] | list[str | list[int]]
    """Text or token ids; several in a list."""
    max_tokens: int | None = Field(16, ge=1)
    """Most tokens of output; null: as many as there is room for."""

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(isinstance(item, int) for item in prompt):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]
