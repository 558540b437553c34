# SPDX-License-Identifier: Apache-2.0
"""Publish the weights of a TRL or transformers trainer as sparse deltas.

trl_delta.DeltaSyncCallback(bucket="...")      for any Trainer
trl_delta.attach(trainer, bucket="...")        AsyncGRPOTrainer, and GRPOTrainer in vLLM server mode, without NCCL
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_delta.callback import DeltaSyncCallback
    from trl_delta.config import DeltaSyncConfig
    from trl_delta.session import DeltaSyncSession
    from trl_delta.transfer import DeltaWeightTransfer, attach, server_mode

__all__ = ["DeltaSyncCallback", "DeltaSyncConfig", "DeltaSyncSession", "DeltaWeightTransfer", "attach", "server_mode"]

# torch, transformers and trl are imported with the first name that needs them
_HOME = {
    "DeltaSyncCallback": "trl_delta.callback",
    "DeltaSyncConfig": "trl_delta.config",
    "DeltaSyncSession": "trl_delta.session",
    "DeltaWeightTransfer": "trl_delta.transfer",
    "attach": "trl_delta.transfer",
    "server_mode": "trl_delta.transfer",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
