# SPDX-License-Identifier: Apache-2.0
"""A worker extension for servers whose weights lie otherwise than the map says.

What our plugin does about layouts of vLLM's CPU build is undone when vLLM imports this file, before it loads a model.
Needs this folder on the path of the server.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.model_executor.layers import utils

from vllm_delta import orders
from vllm_delta.worker import DeltaWorkerExtension


class Other(DeltaWorkerExtension):
    """As it is; what counts is what the file does."""


def _find_no_orders(model: Any, storages: Any) -> dict[int, orders.Order]:
    return {}


if os.environ["TEST_LAYOUT"] == "permuted":
    # the permutation of expert weights is not known
    orders.find_orders = _find_no_orders
if os.environ["TEST_LAYOUT"] == "packed head":
    # the embedding is the head, too: its weight stays, and a kernel has a packed copy of it
    plain: Any = utils.dispatch_cpu_unquantized_gemm

    def pack_heads(layer: Any, remove_weight: bool) -> None:
        (plain if remove_weight else plain.__wrapped__)(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = pack_heads
