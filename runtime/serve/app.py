"""The routes: OpenAI's completions over the engine worker, and what shows how the core is doing."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.errors import DflashError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from runtime.engine import Engine
from runtime.serve.answers import Answer, AnswerHead, step_document
from runtime.serve.body import read_json
from runtime.serve.core_view import CoreFacts, graph_document, identity_document
from runtime.serve.errors import ApiError
from runtime.serve.guard import Guard, is_loopback
from runtime.serve.hangup import until_hangup
from runtime.serve.images import ImageReader, placed
from runtime.serve.metrics import Metrics
from runtime.serve.openapi import describe
from runtime.serve.protocol import ChatBody, CompletionBody, SamplingBody, parse_body
from runtime.serve.settings import MAX_BODY_BYTES, MAX_IMAGE_BODY_BYTES, ServeSettings
from runtime.serve.text import TextAssembler
from runtime.serve.worker import EngineWorker, FailedEvent, Job, QueueFullError
from runtime.text import CoreText
from runtime.vision.splice import image_text

if TYPE_CHECKING:
    from runtime.vision.preprocess import ImagePatches
    from runtime.vision.rows import PromptImages

PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


@dataclass(slots=True)
class Served:
    """What the routes need once the core is loaded."""

    text: CoreText
    metrics: Metrics
    facts: CoreFacts
    model: str
    fingerprint: str
    canary: dict[str, Any] | None = None


@dataclass(slots=True)
class ServerState:
    """One server: its settings, its worker, and what start-up filled in; `shut_down` may be called from any thread."""

    settings: ServeSettings
    worker: EngineWorker
    version: str
    served: Served | None = None
    shut_down: Callable[[], None] = lambda: None
    created: int = field(default_factory=lambda: int(time.time()))

    def ready(self) -> Served:
        """What is served. Raises ApiError: 503 until the core is warm."""
        if self.served is None or not self.worker.ready:
            raise ApiError(503, f"the core is not ready: {self.worker.phase.name}", kind="server_error",
                           code="not_ready", headers={"retry-after": "1"})
        return self.served


def make_app(state: ServerState) -> Starlette:
    """The ASGI application over a server's state."""
    routes = Routes(state)
    return Starlette(
        routes=[
            Route("/", routes.page), Route("/health", routes.health), Route("/startupz", routes.startup),
            Route("/metrics", routes.metrics), Route("/server_info", routes.server_info),
            Route("/openapi.json", routes.openapi), Route("/dflash/graphs/{name}", routes.graph),
            Route("/v1/models", routes.models), Route("/v1/models/{model:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, local_only=is_loopback(state.settings.host), api_key=state.settings.api_key)],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _broken})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code="no_such_route",
                    headers=dict(error.headers or {})).response()


async def _broken(request: Request, error: Exception) -> Response:
    return ApiError(500, f"this is a bug in dflash: {type(error).__name__}", kind="server_error", code="bug").response()


class Routes:
    """One method per route."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._page = PAGE.read_text("utf-8")
        self._images = ImageReader()

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": _PAGE_POLICY, "cache-control": "no-store",
                                                 "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"})

    async def health(self, request: Request) -> Response:
        self._state.ready()
        return JSONResponse({"status": "ok"})

    async def startup(self, request: Request) -> Response:
        phase = self._state.worker.phase
        return JSONResponse({"phase": phase.name, "done": phase.done, "total": phase.total,
                             "seconds": self._state.worker.startup_s})

    async def metrics(self, request: Request) -> Response:
        return Response(self._state.ready().metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(describe(self._state.version))

    async def server_info(self, request: Request) -> Response:
        served, worker = self._state.ready(), self._state.worker
        assert worker.core is not None and worker.engine is not None
        return JSONResponse({
            "version": self._state.version, "device": self._state.settings.device,
            "core": identity_document(worker.core, served.facts), "canary": served.canary,
            "startup_s": worker.startup_s, "unfinished": worker.unfinished,
            "limits": {"max_waiting": self._state.settings.max_waiting},
            "kv_pages_free": worker.engine.pages.available})

    async def graph(self, request: Request) -> Response:
        document = graph_document(self._state.ready().facts, request.path_params["name"])
        if document is None:
            raise ApiError(404, f"no graph is named {request.path_params['name']!r}", param="name", code="not_found")
        return JSONResponse(document)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await self._json(request))
        served = self._state.ready()
        self._check_model(body.model)
        prompt = served.text.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        images = self._placed(prompt, (), param="prompt")
        return await self._answer(request, body, served, prompt, images, body.max_tokens, body.logprobs, chat=False)

    async def chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await self._json(request))
        served = self._state.ready()
        self._check_model(body.model)
        try:
            patches = await self._images.read(self._engine(), body.messages)
            texts = (image_text(image.width, image.height) for image in patches)
            prompt = served.text.encode_chat([message.document(texts) for message in body.messages],
                                             add_generation_prompt=body.add_generation_prompt)
        except DflashError as e:
            raise ApiError.of(e) from e
        images = self._placed(prompt, patches, param="messages")
        prompt = prompt if images is None else list(images.prompt.tokens)
        room = served.facts.manifest.contract.max_context - len(prompt)
        max_tokens = body.max_completion_tokens or body.max_tokens or max(room, 1)
        return await self._answer(request, body, served, prompt, images, max_tokens, body.wanted_logprobs, chat=True)

    async def _json(self, request: Request) -> Any:
        """The body; of a core that sees it may be as large as images are."""
        engine = self._state.worker.engine
        most = MAX_IMAGE_BODY_BYTES if engine is not None and engine.sees else MAX_BODY_BYTES
        return await read_json(request, self._state.settings.body_timeout_s, most)

    def _engine(self) -> Engine:
        engine = self._state.worker.engine
        assert engine is not None
        return engine

    def _placed(self, tokens: list[int], patches: Sequence[ImagePatches], *, param: str) -> PromptImages | None:
        try:
            return placed(self._engine(), tokens, patches)
        except DflashError as e:
            raise ApiError.of(e, param=param) from e

    def _model(self) -> dict[str, Any]:
        served = self._state.ready()
        return {"id": served.model, "object": "model", "created": self._state.created, "owned_by": "dflash",
                "max_model_len": served.facts.manifest.contract.max_context}

    def _check_model(self, name: str) -> None:
        served = self._state.ready()
        if name != served.model:
            raise ApiError(404, f"the model {name!r} is not served here, {served.model!r} is", param="model",
                           code="model_not_found")

    async def _answer(self, request: Request, body: SamplingBody, served: Served, prompt: list[int],
                      images: PromptImages | None, max_tokens: int, logprobs: int | None, *, chat: bool) -> Response:
        head = AnswerHead.new(chat=chat, model=served.model, fingerprint=served.fingerprint)
        worker = self._state.worker
        try:
            job = worker.submit(head.request_id, prompt,
                                body.request(max_tokens, served.text.stop_token_ids, logprobs), images)
        except QueueFullError as e:
            raise ApiError(429, "too many requests wait already", kind="rate_limit_error", code="queue_full",
                           headers={"retry-after": str(e.retry_after_s)}) from e
        except DflashError as e:
            raise ApiError.of(e) from e
        answer = Answer(head, served.text, TextAssembler(served.text, body.stops), len(prompt), self._engine().depth,
                        logprobs is not None)
        if body.stream:
            return StreamingResponse(self._stream(answer, job, body), media_type="text/event-stream",
                                     headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        return await until_hangup(request, self._whole(answer, job))

    async def _whole(self, answer: Answer, job: Job) -> Response:
        try:
            async for event in job.events():
                if isinstance(event, FailedEvent):
                    raise ApiError.of(event.error)
                answer.take(event.record, event.finish_reason.value if event.finish_reason else None)
                if answer.finish_reason is not None:
                    break
        finally:
            self._state.worker.cancel(job, answer.finish_reason or "abort")
        return JSONResponse(answer.whole())

    async def _stream(self, answer: Answer, job: Job, body: SamplingBody) -> AsyncIterator[str]:
        options = body.stream_options
        try:
            opening = answer.opening()
            if opening is not None:
                yield _sse(opening)
            async for event in job.events():
                if isinstance(event, FailedEvent):
                    yield _sse(ApiError.of(event.error).document())
                    break
                pieces, fresh = answer.take(event.record, event.finish_reason.value if event.finish_reason else None)
                chunk = answer.chunk(fresh, event.record.logprobs[:len(pieces)])
                if options is not None and options.include_steps:
                    chunk["dflash"] = step_document(event.record, pieces, event.times)
                yield _sse(chunk)
                if answer.finish_reason is not None:
                    if options is not None and options.include_usage:
                        yield _sse(answer.closing())
                    break
            yield "data: [DONE]\n\n"
        finally:
            self._state.worker.cancel(job, answer.finish_reason or "abort")


def _sse(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"
