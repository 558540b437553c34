# SPDX-License-Identifier: Apache-2.0
"""Where the bits of the last extraction are kept: 2 bytes for each element that a process owns, and nothing more.

On the weights' own device, where they cost least time; in host memory, page-locked for a GPU; or in a mapped file that
disappears with the process. What is not on the device is brought there a piece at a time to be compared.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from delta_wire import kernels
from delta_wire.errors import SetupError
from trl_delta.dtensors import local_tensor
from trl_delta.names import LiveTensor

logger = logging.getLogger(__name__)

Placement = Literal["device", "host", "file"]
_ITEM_BYTES = 2
# shares of what is free that a snapshot may take: activations and the caches of others need the rest
_DEVICE_FRAC, _HOST_FRAC = 0.25, 0.5
# of the snapshot, brought to the device in one go: 256 MiB
_STAGED_ELEMENTS = 1 << 27


@dataclass(frozen=True, slots=True)
class Free:
    """Free memory in bytes, as far as this process may count on it.

    Args:
        device_bytes (`int`, *optional*): of the GPU that the weights are on; `None` if they are in host memory.
        host_bytes (`int`): available host memory, divided by the training processes of this machine.
        disk_bytes (`int`): of the folder for temporary files, divided likewise.
        folder (`Path`): that folder.
    """

    device_bytes: int | None
    host_bytes: int
    disk_bytes: int
    folder: Path

    @classmethod
    def measure(cls, device: torch.device) -> Free:
        """What is free now."""
        processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        folder = Path(tempfile.gettempdir())
        on_gpu = device.type == "cuda"
        return cls(
            torch.cuda.mem_get_info(device)[0] if on_gpu else None,
            _available_host_bytes() // processes,
            shutil.disk_usage(folder).free // processes,
            folder,
        )


def training_bytes(live: Iterable[LiveTensor]) -> int:
    """What training will take beside the weights on this process: gradients and two moments of what is trained."""
    trained = {id(entry.source): entry.source for entry in live if entry.source.requires_grad}
    return sum(3 * local.numel() * local.element_size() for local in map(local_tensor, trained.values()))


def choose(wanted: str, own: Iterable[LiveTensor], *, to_come_bytes: int = 0, free: Free | None = None) -> Placement:
    """Where the snapshot of these tensors goes.

    Args:
        wanted (`str`): `"auto"`, or a placement, which is taken as it is.
        own (list of [`LiveTensor`]): what this process owns.
        to_come_bytes (`int`, *optional*, defaults to `0`): see [`training_bytes`].
        free ([`Free`], *optional*): measured if it is not given.

    `"auto"` is the device if the snapshot takes at most a quarter of what is free there besides what is to come, else
    the host if it takes at most half of the memory available, else a file. [`SetupError`] if the disk has no room
    either.
    """
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    own = list(own)
    need_bytes = _ITEM_BYTES * sum(prod(entry.shape) for entry in own)
    devices = {entry.source.device for entry in own}
    if len(devices) != 1:
        # weights in several places: each snapshot beside its own
        return "device"
    (device,) = devices
    free = free or Free.measure(device)
    host_bytes = free.host_bytes
    if free.device_bytes is None:
        # the weights' own device is the host
        host_bytes -= to_come_bytes
    elif need_bytes <= _DEVICE_FRAC * (free.device_bytes - to_come_bytes):
        return "device"
    if need_bytes <= _HOST_FRAC * host_bytes:
        return "device" if free.device_bytes is None else "host"
    if need_bytes > free.disk_bytes:
        raise SetupError(
            f"delta sync needs {need_bytes} bytes to remember the published weights and finds no room: on the device "
            f"{free.device_bytes}, in host memory {free.host_bytes}, in {free.folder} {free.disk_bytes} bytes are "
            "free for this process. Point TMPDIR at a larger disk, or set delta_sync_snapshot."
        )
    return "file"


class Room:
    """Memory for a snapshot.

    Args:
        placement (`str`): where.
        num_elements (`int`): of all tensors.
    """

    def __init__(self, placement: Placement, num_elements: int):
        self._block: torch.Tensor | None = None
        self._used = 0
        if placement == "host":
            self._block = torch.empty(num_elements, dtype=torch.int16)
            _lock_pages(self._block)
        elif placement == "file":
            self._block = _mapped(num_elements)

    def keep(self, bits: torch.Tensor) -> torch.Tensor:
        """Bits (int16, flat) at their place; on the device they stay where they are."""
        if self._block is None:
            return bits
        held = self._block[self._used : self._used + bits.numel()]
        self._used += bits.numel()
        return held.copy_(bits)


def extract_staged(
    values: torch.Tensor, held: torch.Tensor, staged_elements: int = _STAGED_ELEMENTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As [`delta_wire.kernels.extract`], with the snapshot in host memory or in a file.

    Args:
        values (`torch.Tensor`): contiguous, on any device.
        held (`torch.Tensor`): int16, flat, on the host; brought up to date unless this raises.
        staged_elements (`int`, *optional*): how many to have on the device at a time.

    Returns:
        `(indices, old, new)` on the host.
    """
    flat = values.detach().reshape(-1)
    found = []
    for start in range(0, max(1, flat.numel()), staged_elements):
        stop = min(start + staged_elements, flat.numel())
        staged = held[start:stop].to(flat.device, non_blocking=True, copy=True)
        indices, old, new = (part.cpu() for part in kernels.extract(flat[start:stop], staged))
        if start:
            indices = (indices.to(torch.int64) + start).to(torch.int64 if flat.numel() >= 1 << 31 else torch.int32)
        found.append((indices, old, new))
    indices, old, new = (torch.cat(parts) for parts in zip(*found, strict=True))
    kernels.scatter(held, indices.to(torch.int64), new)
    return indices, old, new


def _mapped(num_elements: int) -> torch.Tensor:
    """A file of its own in the folder for temporary files, already deleted: it lasts as long as the tensor."""
    size_bytes = _ITEM_BYTES * num_elements
    folder = tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(prefix="delta-snapshot-", dir=folder) as file:
        if num_elements == 0:
            return torch.empty(0, dtype=torch.int16)
        try:
            # room that is promised and not there would end the process at some later write
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            raise SetupError(
                f"{folder}: cannot take the {size_bytes} bytes of delta sync's snapshot: {error.strerror}. Point "
                "TMPDIR at a larger disk, or set delta_sync_snapshot to host or device."
            ) from error
        return torch.from_file(file.name, shared=True, size=num_elements, dtype=torch.int16)


def _lock_pages(block: torch.Tensor) -> None:
    """Let a GPU read a block without a copy. Registered as it is: torch's own pinned memory comes in powers of two."""
    if not torch.cuda.is_available() or not block.numel():
        return
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(block.data_ptr(), block.numel() * _ITEM_BYTES, 1)
    if int(error) != 0:
        logger.info("delta sync: the snapshot's %d bytes cannot be page-locked (%s)", block.nbytes, error)


def _available_host_bytes() -> int:
    """Memory that new allocations can have without swapping, within the limits of a container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available
