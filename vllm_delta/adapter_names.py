# SPDX-License-Identifier: Apache-2.0
"""The name of the run's adapter in an API server: requests with it as `model` are served without any call to load it.

Runs in each API server process. What is loaded is the engine core's business; here is only its name.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_delta.adapter_slot import ADAPTER_ID, NO_PATH
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
        self._name: str | None = None

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
        if adapter is None or adapter["name"] == self._name:
            return
        from vllm.lora.request import LoRARequest

        name = adapter["name"]
        if models.is_base_model(name):
            logger.error(
                "the run's adapter is called %s, like the served model, so it cannot be asked for; serve the model "
                "under another name (--served-model-name), or publish with another delta_sync_adapter_name",
                name,
            )
        elif name in models.lora_requests:
            logger.error(
                "the run's adapter is called %s, like one that was loaded before, so it cannot be asked for; give "
                "them different names",
                name,
            )
        else:
            models.lora_requests.pop(self._name, None)
            models.lora_requests[name] = LoRARequest(name, ADAPTER_ID, NO_PATH)
        self._name = name
