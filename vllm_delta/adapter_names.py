# SPDX-License-Identifier: Apache-2.0
"""The name of the run's adapter in an API server: requests with it as `model` are served without any call to load it.

Runs in each API server process. What is loaded is the engine core's business; here is only its name.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_delta.adapter_label import ADAPTER_ID, NO_PATH
from vllm_delta.versions import Served

logger = logging.getLogger("vllm.vllm_delta.adapter_names")


class AdapterNameMiddleware:
    """Makes the adapter's name known to vLLM's list of models before a request is looked at.

    Args:
        app: the application inside.
    """

    def __init__(self, app: Any):
        self._app = app
        self._served = Served()
        # name that was told to be taken
        self._told: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (scope["method"] == "POST" or scope["path"].endswith("/v1/models")):
            state = getattr(scope.get("app"), "state", None)
            client = getattr(state, "engine_client", None)
            models = getattr(state, "openai_serving_models", None)
            if client is not None and models is not None and client.vllm_config.lora_config is not None:
                try:
                    await self._register(client, models)
                except Exception as error:
                    # an engine that does not answer is what the request itself will tell
                    logger.debug("cannot ask the engine for the adapter's name: %s", error)
        await self._app(scope, receive, send)

    async def _register(self, client: Any, models: Any) -> None:
        adapter = (await self._served.look(client))["adapter"]
        if adapter is None:
            return
        from vllm.lora.request import LoRARequest

        name, known = adapter["name"], models.lora_requests.get(adapter["name"])
        if known is not None and known.lora_int_id == ADAPTER_ID:
            return
        if known is None and not models.is_base_model(name):
            for old in [old for old, request in models.lora_requests.items() if request.lora_int_id == ADAPTER_ID]:
                del models.lora_requests[old]
            models.lora_requests[name] = LoRARequest(name, ADAPTER_ID, NO_PATH)
        elif self._told != name:
            self._told = name
            logger.error(
                "the run's adapter is called %s, like %s, so it cannot be asked for; serve that under another name, "
                "or publish with another delta_sync_adapter_name",
                name,
                "the served model" if known is None else "an adapter that was loaded before",
            )
