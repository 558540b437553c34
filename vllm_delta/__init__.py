# SPDX-License-Identifier: Apache-2.0
"""The server side: a running vLLM follows a bucket and swaps its weights between two engine steps.

DELTA_SYNC_BUCKET=… vllm serve MODEL --worker-extension-cls vllm_delta.DeltaWorkerExtension
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_delta.worker import DeltaWorkerExtension

__all__ = ["DeltaWorkerExtension"]


def __getattr__(name: str) -> Any:
    # vLLM asks for this attribute exactly once per worker, while it starts: the place to find out that the other half,
    # the plugin, is missing. A worker without it would serve old weights for ever and look healthy.
    if name != "DeltaWorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_delta import plugin
    from vllm_delta.worker import DeltaWorkerExtension

    plugin.require_registered()
    return DeltaWorkerExtension
