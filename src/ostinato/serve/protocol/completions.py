"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ostinato.serve.http.errors import ApiError
from ostinato.serve.protocol.common import MAX_LOGPROBS, Generating, unserved


def _checked_prompt(value: Any) -> Any:
    """One message for a prompt of no legal form, rather than one for each legal form."""
    if isinstance(value, str) or _are_token_ids(value):
        return value
    if isinstance(value, list) and all(isinstance(each, str) or _are_token_ids(each) for each in value):
        return value
    raise ValueError("a prompt is text or a list of token ids, and several are a list of these")


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


class CompletionRequest(Generating):
    prompt: Annotated[str | list[int] | list[str | list[int]], BeforeValidator(_checked_prompt)]
    """Text or token ids; several in a list."""
    max_tokens: int | None = Field(16, ge=0)
    """Most tokens of output; null: as many as there is room for; 0 needs `echo`, and scores the prompt alone."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Give the log-probability of each token and of so many most likely ones."""
    echo: bool | None = None
    """The text begins with the prompt, and log-probabilities with those of its tokens."""
    suffix: Annotated[None, unserved("a prompt is only continued at its end")] = None
    best_of: Annotated[None, unserved("ask for n outputs with logprobs, and choose among them")] = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is an empty list; a prompt is text or token ids", param="prompt")
        if all(isinstance(item, int) for item in prompt):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    def check_echo(self) -> None:
        """ApiError for what goes with `echo` alone."""
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 needs echo: there would be no text", param="max_tokens")
