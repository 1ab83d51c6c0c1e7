"""Prompts of the requests that the router passes on, as the backends will see them: token ids, salt and images."""

from __future__ import annotations

from dataclasses import replace

from ostinato.config import EngineConfig
from ostinato.engine.process.engine_messages import EngineStarted, SubmitRequest
from ostinato.engine.text.tokenizer import load_default_params, load_tokenizer
from ostinato.errors import ConfigError, OstinatoError, RequestError
from ostinato.models.checkpoint import PLAN_FILES, TEXT_FILES, checkpoint_of, load_spec, tokenizer_source
from ostinato.plan.plan import Plan
from ostinato.serve.api.anthropic_request import MessagesRequest
from ostinato.serve.api.chat_completions import ChatRequest
from ostinato.serve.api.completions import CompletionRequest, PreparedCompletion
from ostinato.serve.api.generation_fields import GenerationBody
from ostinato.serve.api.generation_run import PreparedChat
from ostinato.serve.api.ollama_request import OllamaChatRequest, OllamaGenerateRequest
from ostinato.serve.api.responses_request import PreparedResponse, ResponsesRequest
from ostinato.serve.body_workers.context import NeedsWorker, WorkerContext
from ostinato.serve.body_workers.json_complexity import check_small_body, fits_event_loop
from ostinato.serve.body_workers.pool import BodyWorkerPool
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.json_bodies import read_body
from ostinato.serve.settings import ServeSettings

BODIES: dict[str, type[GenerationBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
}
"""Bodies of the endpoints that generate, by path."""


class PromptReader:
    """Reader of bodies: small ones on the event loop, others in worker processes, as in a server."""

    def __init__(self, plan: Plan, model: str, names: tuple[str, ...], settings: ServeSettings) -> None:
        """Load the tokenizer and the chat template of `model`, a checkpoint on this machine.

        ConfigError if it cannot be read. `plan` and the served `names` are those of the backends. Images are read only
        where they are in the body.
        """
        of_tokenizer = plan.settings.tokenizer
        config = EngineConfig(model=model)
        config = config if of_tokenizer is None else config.with_settings(tokenizer=of_tokenizer)
        try:
            spec = load_spec(config)
            directory = checkpoint_of(config, (*PLAN_FILES, *TEXT_FILES, "generation_config.json"))
            tokenizer = load_tokenizer(tokenizer_source(config, directory), directory)
            params = load_default_params(tokenizer, directory)
            plan = replace(plan, settings=plan.settings.model_copy(update={"model": model}))
            started = EngineStarted(plan, directory, params, spec.vocab_size, spec.vision, spec.hidden_size)
            self._settings = settings.without_keys().model_copy(
                update={"served_model_name": names, "unknown_fields": "ignore"}
            )
            context = WorkerContext(started, self._settings, names[0], remote=False)
            self._context = context.loop_context()
        except OstinatoError as error:
            message = (
                f"the router needs the tokenizer of the backends' model, {model}: {error}; name its checkpoint here"
            )
            raise ConfigError(message) from error
        self.workers = BodyWorkerPool(context)

    async def read(self, path: str, sent: bytes, client: str, request_id: str) -> SubmitRequest | None:
        """Return the prompt of a request; None for a body that has none, or that is wrong: its backend answers that."""
        kind = BODIES.get(path)
        if kind is None:
            return None
        try:
            if not fits_event_loop(sent):
                body, prepared = await self.workers.read(client, kind, sent)
            else:
                check_small_body(sent, self._settings)
                try:
                    body, prepared = read_body(kind, sent, self._context, "ignore")
                except NeedsWorker:
                    body, prepared = await self.workers.read(client, kind, sent)
        except (ApiError, RequestError):
            return None
        assert isinstance(body, GenerationBody), "one of BODIES"
        match prepared:
            case PreparedResponse():
                token_ids, media = prepared.chat.token_ids, prepared.chat.media
            case PreparedChat():
                token_ids, media = prepared.token_ids, prepared.media
            case PreparedCompletion():
                token_ids, media = max(prepared.prompts, key=len), None
            case _:
                return None
        params = prepared.chat.params if isinstance(prepared, PreparedResponse) else prepared.params
        return SubmitRequest(request_id, token_ids, params, 0, body.cache_salt, media)

    async def stop(self) -> None:
        """End the worker processes."""
        await self.workers.stop()
