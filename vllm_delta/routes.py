# SPDX-License-Identifier: Apache-2.0
"""`GET /delta/status` and `POST /delta/verify` on vLLM's own API server, and what is added to its answers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request

from vllm_delta.adapter_names import AdapterNameMiddleware
from vllm_delta.health import HealthMiddleware
from vllm_delta.metrics import MetricsMiddleware
from vllm_delta.settings import Settings
from vllm_delta.versions import VersionMiddleware

router = APIRouter(prefix="/delta")


async def _ask(request: Request, method: str) -> Any:
    client = getattr(request.app.state, "engine_client", None)
    if client is None:
        raise HTTPException(503, "this server has no engine")
    try:
        return await client.engine_core.call_utility_async(method)
    # vLLM's errors for a dead engine and for a failed call have no common base
    except Exception as error:
        raise HTTPException(503, f"the engine core did not answer: {error}") from error


def _require_key(request: Request) -> None:
    """Verification costs a pass over all weights: where vLLM guards its API with a key, this is guarded too."""
    from vllm import envs
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    keys = [key for key in (request.app.state.args.api_key or [envs.VLLM_API_KEY]) if key]
    if keys and not AuthenticationMiddleware(request.app, keys).verify_token(request.headers):
        raise HTTPException(401, "Unauthorized")


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """What the server serves, and what keeps it from following if it does not."""
    return await _ask(request, "delta_status")


@router.post("/verify")
async def verify(request: Request) -> dict[str, Any]:
    """Recompute the digest of all live weights on all ranks."""
    _require_key(request)
    answer = await _ask(request, "delta_verify")
    if "error" in answer:
        raise HTTPException(503, f"the live weights cannot be verified: {answer['error']}")
    return answer


def attach(app: FastAPI, settings: Settings) -> None:
    """Add the routes, the metrics and the versions in headers to an application."""
    app.include_router(router)
    app.add_middleware(HealthMiddleware)
    app.add_middleware(MetricsMiddleware)
    # the last one added sees a request first: the name may be known only after the version asked for is there
    app.add_middleware(AdapterNameMiddleware)
    app.add_middleware(VersionMiddleware, wait_s=settings.min_version_wait_s)
