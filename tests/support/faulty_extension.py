# SPDX-License-Identifier: Apache-2.0
"""The worker extension with failures that a test can arm: `vllm serve --worker-extension-cls faulty_extension.Faulty`.

Needs this folder on the path of the server and vLLM's development routes, through which it is armed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from half_written import run_half

from delta_wire import kernels
from delta_wire.kernels import replacement
from vllm_delta.adapter_label import ADAPTER_ID
from vllm_delta.adapter_slot import AdapterSlot
from vllm_delta.worker import DeltaWorkerExtension


class Faulty(DeltaWorkerExtension):
    """Fails on one rank, every time until it is armed with an empty list."""

    # set by vLLM's own worker
    rank: int
    delta_faults_: tuple[str, ...] = ()

    def delta_arm(self, rank: int, faults: list[str]) -> dict[str, Any]:
        """Arm failures on a rank; an empty list disarms."""
        if self.rank == rank:
            self.delta_faults_ = tuple(faults)
        return {"rank": self.rank, "faults": list(self.delta_faults_)}

    def delta_submit(self, job: int, kind: str, *args: str) -> dict[str, Any]:
        if "truncated stage file" in self.delta_faults_ and kind == "plan_delta":
            staged = Path(args[0])
            # its own copy: the other rank maps the file
            half = staged.with_name("half.safetensors")
            half.write_bytes(staged.read_bytes()[: staged.stat().st_size // 2])
            args = (str(half),)
        return super().delta_submit(job, kind, *args)

    def delta_lose(self) -> dict[str, Any]:
        """Leave nothing of the weights, as sleeping does where memory is given back."""
        with torch.no_grad():
            for param in self.get_model().parameters():  # type: ignore[attr-defined]
                param.zero_()
        return {}

    def delta_spoil(self) -> dict[str, Any]:
        """Flip a bit of the run's adapter."""
        _spoil(self.delta_rank_.adapter)
        return {}

    def delta_commit(self) -> dict[str, Any]:
        if "adapter" in self.delta_faults_:
            put = AdapterSlot._put

            def put_and_spoil(slot: AdapterSlot, loaded: Any) -> None:
                put(slot, loaded)
                _spoil(slot)

            with mock.patch.object(AdapterSlot, "_put", put_and_spoil):
                return super().delta_commit()
        if "scatter" not in self.delta_faults_:
            return super().delta_commit()

        def fail_half_way(changes: kernels.Replacements) -> Any:
            run_half(changes)
            raise RuntimeError("the device fell off the bus in the middle of the scatter")

        with mock.patch.object(replacement._OnHost, "run", fail_half_way):
            return super().delta_commit()

    def delta_undo(self) -> dict[str, Any]:
        if "undo" in self.delta_faults_:
            return {"restored": False}
        return super().delta_undo()


def _spoil(slot: AdapterSlot) -> None:
    manager = slot._manager
    # not the embedding, whose buffers have another form
    layer = next(module for module in manager.modules.values() if isinstance(module.lora_b_stacked, tuple))
    layer.lora_b_stacked[0].view(torch.int16)[manager.lora_index_to_id.index(ADAPTER_ID), 0, 0, 0] ^= 1
