"""Every HTTP route that does not generate, as a FastAPI application."""

from __future__ import annotations

import asyncio
import html
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match

import ouro_sgl
from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.manager import TokenizerManager
from ouro_sgl.frontend.metrics import CONTENT_TYPE
from ouro_sgl.frontend.openai.protocol import Items, ModelCard, ModelList
from ouro_sgl.frontend.openai.routes import describe_openai, model_card
from ouro_sgl.frontend.openapi import (
    NO_KEY,
    NOT_READY,
    REFS,
    TOO_LONG,
    ErrorDoc,
    SchemaErrorDoc,
    describe_generate,
)
from ouro_sgl.frontend.sampling import check_ids
from ouro_sgl.messages import ControlReply
from ouro_sgl.models.config import read_json

PROBE_TIMEOUT = 20.0  # seconds
LOAD_TIMEOUT = 2.0  # seconds; those who scrape metrics give up after some ten

HEALTH_ROUTES = ("/health", "/health_generate")  # open to everybody
PROFILE_ROUTES = ("/start_profile", "/stop_profile")  # refused in some states, whatever they bring

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{model} · ouro_sgl</title>
<style>
 body {{ font: 16px/1.6 system-ui, sans-serif; color: #1d2433; background: #f5f3ee; margin: 0 }}
 main {{ max-width: 40rem; margin: 12vh auto; padding: 0 1.5rem }}
 h1 {{ font-size: 1.9rem; margin: 0 }}
 .state {{ color: #8a5a00 }} .state.up {{ color: #1f7a4d }}
 dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.5rem; margin: 1.5rem 0 }}
 dt {{ color: #6b7280 }} dd {{ margin: 0; font-variant-numeric: tabular-nums }}
 a {{ color: #2348b5 }} pre {{ background: #fff; padding: 1rem; border-radius: 8px; overflow-x: auto }}
</style></head><body><main>
<h1>{model}</h1>
<div class="state {state}">{status}</div>
<dl>{facts}</dl>
<pre>curl {url}generate -H 'Content-Type: application/json' \\
  -d '{{"text": "Once upon a time", "sampling_params": {{"exit_threshold": 0.5}}}}'</pre>
<p><a href="docs">API documentation</a> · <a href="metrics">metrics</a> ·
<a href="server_info">settings</a></p>
</main></body></html>
"""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class AbortBody(Strict):
    rid: str | None = None
    abort_all: bool = False


class TokenizeBody(Strict):
    prompt: str | Items[str]
    add_special_tokens: bool = True  # this tokenizer adds none either way


class DetokenizeBody(Strict):
    tokens: Items[int] | Items[Items[int]]
    skip_special_tokens: bool = True


class PauseBody(Strict):
    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="what becomes of requests: they end; or running ones go back to the queue, keep their "
        "output and have its K/V computed again later; or they stay as they are",
    )


class ProfileBody(Strict):
    model_config = ConfigDict(strict=True, extra="forbid")
    output_dir: str | None = Field(
        None,
        description="an existing folder on the server's machine; null: that of the environment variable "
        "SGLANG_TORCH_PROFILER_DIR, else the one for temporary files",
    )


class UpdateWeightsBody(Strict):
    model_path: str = Field(description="a folder with weights of the same shapes, on the server's machine")
    weight_version: str | None = Field(None, description="a name for them; null: the number of the update")
    abort_all_requests: bool = Field(False, description="end all requests first")
    flush_cache: Literal[True] = Field(True, description="K/V of other weights is never used again")


class UpdateWeightsAnswer(BaseModel):
    success: bool
    message: str
    num_paused_requests: int = Field(description="requests that go on with the new weights")


def error_body(message: str) -> dict[str, Any]:
    """A request was understood and refused."""
    return {"error": {"message": message}}


def schema_error_body(message: str) -> dict[str, Any]:
    """A request could not be understood."""
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


def make_routes(manager: TokenizerManager) -> FastAPI:
    """The application; the routes that generate are only documented in it."""
    app = FastAPI(
        title="ouro_sgl",
        version=ouro_sgl.__version__,
        description=f"Serving {manager.model_name}: the routes of SGLang, for a looped model.",
        redoc_url=None,
    )
    _add_error_handlers(app)
    _add_pages(app, manager)
    _add_health(app, manager)
    _add_info(app, manager)
    _add_actions(app, manager)
    _add_rollouts(app, manager)
    _add_profiles(app, manager)
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make_schema()
            path, models = describe_generate()
            openai_paths, openai_models = describe_openai(REFS)
            _document_refusals(schema["paths"])
            schema["paths"] = {"/generate": path, **openai_paths, **schema["paths"]}
            components = schema["components"]["schemas"]
            components.update(models | openai_models)
            for name in ("HTTPValidationError", "ValidationError"):
                del components[name]
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
    return app


def _document_refusals(paths: dict[str, dict[str, Any]]) -> None:
    """Add what is refused before a route is asked, and 400 where FastAPI would send and document 422."""
    error, schema_error = (
        {"$ref": REFS.format(model=model.__name__)} for model in (ErrorDoc, SchemaErrorDoc)
    )
    refusal = {"content": {"application/json": {"schema": error}}}
    either = {"content": {"application/json": {"schema": {"anyOf": [error, schema_error]}}}}
    for path, operations in paths.items():
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)
            if "requestBody" in operation or path in PROFILE_ROUTES:
                responses.setdefault("400", {"description": "The request is refused", **either})
            if path not in HEALTH_ROUTES:
                responses["401"] = {"description": NO_KEY, **refusal}
                responses["503"] = {"description": NOT_READY, **refusal}
            if method == "post" or "requestBody" in operation:
                responses["413"] = {"description": TOO_LONG, **refusal}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return JSONResponse(error_body(error.message), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse(schema_error_body(f"{where}: {first['msg']}"), 400)

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # a body that is no JSON
            return JSONResponse(schema_error_body(str(error.detail)), 400)
        headers = error.headers
        if error.status_code == 405:  # a path may have several routes, each with a method
            matching = (route for route in app.routes if route.matches(request.scope)[0] != Match.NONE)
            allowed = {method for route in matching for method in getattr(route, "methods", None) or ()}
            headers = {"allow": ", ".join(sorted(allowed))}
        return JSONResponse({"detail": error.detail}, error.status_code, headers=headers)


def _add_pages(app: FastAPI, manager: TokenizerManager) -> None:
    @app.get("/", include_in_schema=False)
    async def start_page(request: Request) -> HTMLResponse:
        facts: dict[str, Any] = {"loops per token": f"up to {manager.model.total_loops}"}
        if manager.facts is not None:
            facts["longest request"] = f"{manager.facts.served_length} tokens"
            facts["K/V slots"] = manager.facts.num_slots
            facts["requests at once"] = manager.facts.max_rows
            facts["device"] = manager.facts.server_info["device"]
        facts["exit mode"] = manager.args.exit_mode
        facts["version"] = f"ouro_sgl {ouro_sgl.__version__}"
        status, state = ("ready", "up") if _is_healthy(manager) else ("not ready", "")
        rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in facts.items())
        return HTMLResponse(
            PAGE.format(
                model=html.escape(manager.model_name),
                status=status,
                state=state,
                facts=rows,
                url=html.escape(str(request.base_url)),
            )
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT):
                load = await manager.scheduler_info()
        except (RequestError, TimeoutError):
            load = None  # the counters are there whatever state the server is in
        return Response(manager.metrics.render(load), headers={"content-type": CONTENT_TYPE})


def _is_healthy(manager: TokenizerManager) -> bool:
    return manager.ready.is_set() and manager.failure is None and not manager.stopping


def _add_health(app: FastAPI, manager: TokenizerManager) -> None:
    not_ready: dict[int | str, dict[str, Any]] = {503: {"description": NOT_READY}}

    @app.get("/health", response_class=Response, responses=not_ready)
    async def health() -> Response:
        return Response(status_code=200 if _is_healthy(manager) else 503)

    @app.get("/health_generate", response_class=Response, responses=not_ready)
    async def health_generate() -> Response:
        answered = _is_healthy(manager) and await manager.probe(PROBE_TIMEOUT)
        return Response(status_code=200 if answered else 503)


def _add_info(app: FastAPI, manager: TokenizerManager) -> None:
    args = manager.args
    architectures = read_json(Path(args.model_path) / "config.json").get("architectures")

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        limits = manager.limits()
        return {
            "model_path": manager.model_path,
            "served_model_name": manager.model_name,
            "tokenizer_path": args.tokenizer_path or args.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": manager.weight_version,
            "load_format": args.load_format,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "ouro",
            "architectures": architectures,
            "total_loops": limits.total_loops,
            "vocab_size": limits.vocab_size,
            "context_length": limits.context_length,
        }

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        manager.limits()
        assert manager.facts is not None
        settings = {name: value for name, value in asdict(args).items() if name != "api_key"}
        return {
            **settings,
            **manager.facts.server_info,
            "served_length": manager.facts.served_length,
            "num_slots": manager.facts.num_slots,
            "max_total_tokens": manager.facts.num_slots // manager.facts.total_loops,
            "max_running_requests": manager.facts.max_rows,
            "internal_states": [await manager.scheduler_info()],
            "version": ouro_sgl.__version__,
        }

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[model_card(manager)])

    @app.get(
        "/v1/models/{model:path}",
        response_model=ModelCard,
        responses={404: {"description": "There is no such model", "model": ErrorDoc}},
    )
    async def model(model: str) -> ModelCard | JSONResponse:
        if model != manager.model_name:
            error = {
                "message": f"The model {model!r} does not exist",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
            return JSONResponse({"error": error}, 404)
        return model_card(manager)


def _add_actions(app: FastAPI, manager: TokenizerManager) -> None:
    busy: dict[int | str, dict[str, Any]] = {
        400: {
            "description": "Requests run or wait; nothing is flushed",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    }

    @app.get("/flush_cache", operation_id="flush_cache_get", response_class=PlainTextResponse, responses=busy)
    @app.post(
        "/flush_cache", operation_id="flush_cache_post", response_class=PlainTextResponse, responses=busy
    )
    async def flush_cache() -> PlainTextResponse:
        reply = await manager.flush_cache()
        if reply.ok:
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse(f"Cache not flushed: {reply.message}\n", 400)

    @app.post("/abort_request", response_class=Response)
    async def abort_request(body: Annotated[AbortBody, Body()]) -> Response:
        manager.limits()
        manager.abort(body.rid, abort_all=body.abort_all)
        return Response(status_code=200)

    @app.post("/tokenize")
    async def tokenize(body: Annotated[TokenizeBody, Body()]) -> dict[str, Any]:
        length = manager.limits().served_length
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        lists = await asyncio.to_thread(lambda: [manager.tokenizer.encode(text) for text in texts])
        if isinstance(body.prompt, str):
            return {"tokens": lists[0], "count": len(lists[0]), "max_model_len": length}
        return {"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": length}

    @app.post("/detokenize")
    async def detokenize(body: Annotated[DetokenizeBody, Body()]) -> dict[str, Any]:
        vocab_size = manager.limits().vocab_size
        batch = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists = body.tokens if batch else [body.tokens]

        def decode() -> list[str]:
            return [
                manager.tokenizer.decode(check_ids("tokens", ids, vocab_size), body.skip_special_tokens)
                for ids in lists
            ]

        texts = await asyncio.to_thread(decode)
        return {"text": texts if batch else texts[0]}


def _add_profiles(app: FastAPI, manager: TokenizerManager) -> None:
    """Traces of the worker by torch's profiler, as SGLang takes them."""

    def answer(reply: ControlReply) -> PlainTextResponse:
        if not reply.ok:
            raise RequestError(reply.message)
        return PlainTextResponse(f"{reply.message}\n")

    @app.get("/start_profile", response_class=PlainTextResponse)
    @app.post("/start_profile", response_class=PlainTextResponse)
    async def start_profile(body: Annotated[ProfileBody | None, Body()] = None) -> PlainTextResponse:
        asked = None if body is None else body.output_dir
        folder = asked or os.environ.get("SGLANG_TORCH_PROFILER_DIR") or tempfile.gettempdir()
        return answer(await manager.profile(os.path.abspath(folder)))

    @app.get("/stop_profile", response_class=PlainTextResponse)
    @app.post("/stop_profile", response_class=PlainTextResponse)
    async def stop_profile() -> PlainTextResponse:
        return answer(await manager.profile(None))


def _add_rollouts(app: FastAPI, manager: TokenizerManager) -> None:
    """Reinforcement learning: stop, load other weights, go on."""

    @app.post("/pause_generation")
    async def pause_generation(body: Annotated[PauseBody | None, Body()] = None) -> dict[str, str]:
        await manager.pause("abort" if body is None else body.mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        await manager.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post(
        "/update_weights_from_disk",
        response_model=UpdateWeightsAnswer,
        responses={
            400: {
                "description": "Nothing is changed; the message says why",
                "model": UpdateWeightsAnswer | ErrorDoc | SchemaErrorDoc,
            }
        },
    )
    async def update_weights_from_disk(body: Annotated[UpdateWeightsBody, Body()]) -> JSONResponse:
        if body.abort_all_requests:
            manager.limits()
            manager.abort(abort_all=True)
        reply = await manager.update_weights(body.model_path, body.weight_version)
        answer = UpdateWeightsAnswer(
            success=reply.ok,
            message=reply.message,
            num_paused_requests=reply.info.get("paused_requests", 0),
        )
        return JSONResponse(answer.model_dump(), 200 if reply.ok else 400)
