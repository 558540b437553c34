# SPDX-License-Identifier: Apache-2.0
"""Settings of the trainer's side. What both sides must agree on travels in the bucket instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from delta_wire.adapter import ADAPTER_NAME
from delta_wire.errors import SetupError

ENCODINGS = ("packed", "context", "plain")
ENCODING_VARIABLE = "DELTA_SYNC_ENCODING"
# the first of each is the default
_CHOICES = {
    "delta_sync_encoding": ENCODINGS,
    "delta_sync_snapshot": ("auto", "device", "host", "file"),
    "delta_sync_on_failure": ("warn", "stop"),
    "delta_sync_adapter": ("merged", "separate"),
}
_MAX_WAIT_S = 1e8


def _choice(name: str, help: str, default: Callable[[], str] | None = None) -> Any:
    """A field that has one of a few values, which the command line names."""
    choices = _CHOICES[name]
    metadata = {"help": help, "choices": list(choices)}
    return field(default_factory=default or (lambda: choices[0]), metadata=metadata)


@dataclass
class DeltaSyncConfig:
    """How a training run publishes its weights.

    The fields share a namespace with those of a trainer's own config when a command line or a YAML file is parsed into
    both, hence their prefix. It can also be a base of a config class of your own, which the callback then finds in the
    trainer's arguments: `@dataclass class MyConfig(DeltaSyncConfig, GRPOConfig)`.

    Args:
        delta_sync_bucket (`str`, *optional*):
            Address of the bucket, by which the servers know it, too: a folder that both reach, or the URL of a store.
            May be given to [`DeltaSyncCallback`] or [`attach`] instead.
        delta_sync_steps (`int`, *optional*, defaults to `1`):
            Publish every so many optimizer steps. What is skipped is part of the next version, and the last step is
            always published.
        delta_sync_encoding (`str`, *optional*, defaults to `DELTA_SYNC_ENCODING` in the environment or `"packed"`):
            Encoding of the deltas: `"packed"` is small and needs nothing else; `"context"` is half of that and keeps a
            second copy of the weights in host memory, 2 bytes per parameter, here and on each server's host; `"plain"`
            is what readers of published sparse safetensors expect, four times as large as `"packed"`.
        delta_sync_snapshot (`str`, *optional*, defaults to `"auto"`):
            Where the bits of the published weights are remembered, 2 bytes for each parameter that a process owns:
            `"device"` beside the weights, `"host"` in (page-locked) host memory, `"file"` in a mapped file below
            `TMPDIR`. `"auto"` takes the first of these that has room: a quarter of what is free on the device besides
            gradients and optimizer state, half of what is free on the host.
        delta_sync_on_failure (`str`, *optional*, defaults to `"warn"`):
            What an error does that another try cannot mend (another writer, a foreign object): `"warn"` reports it
            once and trains on without publishing, `"stop"` raises it in the training loop, on all processes after the
            same step. With `"warn"`, weights that cannot be looked at (no memory left) cost a version, and the next
            one contains what has changed. A bucket out of reach is neither: it is tried again for as long as training
            lasts.
        delta_sync_close_timeout_s (`float`, *optional*, defaults to `120.0`):
            Seconds to wait after training until the last version is durable.
        delta_sync_expected_servers (`int`, *optional*, defaults to `1`):
            Servers that must have acknowledged a version before rollouts are labelled with it.
        delta_sync_start_timeout_s (`float`, *optional*, defaults to `240.0`):
            Seconds that [`attach`]ed training waits at its start until the servers serve its first version. `0` starts
            at once.
        delta_sync_server_timeout_s (`float`, *optional*, defaults to `300.0`):
            A server that has fallen behind and has said nothing for so many seconds is taken for gone.
        delta_sync_ack_poll_s (`float`, *optional*, defaults to `0.2`):
            Seconds between two looks at the servers' acknowledgements.
        delta_sync_max_lag_versions (`int`, *optional*):
            How many versions the slowest server may be behind the newest weights before the trainer waits for it.
            Unset, AsyncGRPO and all trainers that only publish never wait; GRPO in server mode, whose generation is
            part of a step, waits for the weights of the step, as with `0`.
        delta_sync_lag_timeout_s (`float`, *optional*, defaults to `300.0`):
            Longest such wait in seconds. Then `delta_sync_on_failure` decides: `"warn"` reports it once and trains on
            until the servers have caught up, `"stop"` raises.
        delta_sync_anchor_factor (`float`, *optional*, defaults to `1.0`):
            A version gets an anchor, a whole checkpoint in the bucket, when the deltas since the last one have become
            so many times as large as the model. `0` never uploads one, and nothing is ever removed then.
        delta_sync_retention (`bool`, *optional*, defaults to `True`):
            Whether old versions are removed: those before the second newest anchor that no live server needs.
        delta_sync_retention_grace_s (`float`, *optional*, defaults to `3600.0`):
            Seconds that what has become useless stays in the bucket, and that a silent server still counts as live.
        delta_sync_signing_key (`str`, *optional*):
            File with an Ed25519 private key (`delta-wire keygen`). Every version is signed with it; servers that are
            given the public key accept no other.
        delta_sync_adapter (`str`, *optional*, defaults to `"merged"`):
            What is published of a PEFT model: `"merged"` the model's weights with the adapter in them; `"separate"`
            the active adapter alone, a few MB, which servers started with `--enable-lora` load beside the base model
            that it was trained on.
        delta_sync_adapter_name (`str`, *optional*, defaults to `"adapter"`):
            With `"separate"`: the model's name in requests to those servers. It travels with the run.
    """

    delta_sync_bucket: str | None = field(
        default=None,
        metadata={"help": "Address of the bucket: a folder that trainer and servers reach, or the URL of a store."},
    )
    delta_sync_steps: int = field(
        default=1,
        metadata={"help": "Publish every so many optimizer steps; the last step is always published."},
    )
    delta_sync_encoding: str = _choice(
        "delta_sync_encoding",
        "Encoding of the deltas: 'packed' (small), 'context' (half of that, takes 2 bytes of host memory per "
        "parameter on both sides) or 'plain' (sparse safetensors that other readers know).",
        lambda: os.environ.get(ENCODING_VARIABLE) or ENCODINGS[0],
    )
    delta_sync_snapshot: str = _choice(
        "delta_sync_snapshot",
        "Where the published weights are remembered, 2 bytes per parameter: on the 'device', in 'host' memory, in a "
        "'file' below TMPDIR, or 'auto', the first of these with room.",
    )
    delta_sync_on_failure: str = _choice(
        "delta_sync_on_failure",
        "On an error that another try cannot mend: 'warn' once and train on unpublished, or 'stop'.",
    )
    delta_sync_close_timeout_s: float = field(
        default=120.0,
        metadata={"help": "Seconds to wait after training until the last version is durable."},
    )
    delta_sync_expected_servers: int = field(
        default=1,
        metadata={"help": "Servers that must acknowledge a version before rollouts are labelled with it."},
    )
    delta_sync_start_timeout_s: float = field(
        default=240.0,
        metadata={"help": "Seconds to wait at the start until the servers serve the first version; 0 starts at once."},
    )
    delta_sync_server_timeout_s: float = field(
        default=300.0,
        metadata={"help": "A server that is behind and silent for so many seconds is taken for gone."},
    )
    delta_sync_ack_poll_s: float = field(
        default=0.2,
        metadata={"help": "Seconds between two looks at the servers' acknowledgements."},
    )
    delta_sync_max_lag_versions: int | None = field(
        default=None,
        metadata={
            "help": "Versions that the slowest server may be behind before the trainer waits for it; unset, only GRPO "
            "in server mode waits, for the weights of its step."
        },
    )
    delta_sync_lag_timeout_s: float = field(
        default=300.0,
        metadata={"help": "Longest wait in seconds for servers that are behind; then delta_sync_on_failure decides."},
    )

    delta_sync_anchor_factor: float = field(
        default=1.0,
        metadata={
            "help": "Upload a checkpoint when the deltas since the last have so many times its size; 0 for never."
        },
    )
    delta_sync_retention: bool = field(
        default=True,
        metadata={"help": "Remove versions before the second newest checkpoint that no live server needs."},
    )
    delta_sync_retention_grace_s: float = field(
        default=3600.0,
        metadata={"help": "Seconds that what nobody needs any more stays, and that a silent server counts as live."},
    )
    delta_sync_signing_key: str | None = field(
        default=None,
        metadata={"help": "File with an Ed25519 private key (delta-wire keygen) that signs every version."},
    )
    delta_sync_adapter: str = _choice(
        "delta_sync_adapter",
        "What is published of a PEFT model: its weights with the adapter 'merged' into them, or the adapter as a "
        "'separate' one, which servers load with --enable-lora.",
    )
    delta_sync_adapter_name: str = field(
        default="adapter",
        metadata={"help": "Model name by which requests ask servers for a separate adapter."},
    )

    def __post_init__(self):
        # a base of somebody's own config is followed by the trainer's, which has work of its own to do here
        trainers = getattr(super(), "__post_init__", None)
        if trainers is not None:
            trainers()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                also = f" (or {ENCODING_VARIABLE})" if name == "delta_sync_encoding" else ""
                raise SetupError(f"{name}{also}: expected one of {', '.join(choices)}, found {getattr(self, name)!r}")
        name = self.delta_sync_adapter_name
        if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name):
            raise SetupError(
                "delta_sync_adapter_name: expected up to 64 letters, digits, '.', '_' or '-', starting with a letter "
                f"or digit, found {name!r:.100}"
            )
        for name in ("delta_sync_steps", "delta_sync_expected_servers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SetupError(f"{name}: expected a whole number of at least 1, found {value!r}")
        lag = self.delta_sync_max_lag_versions
        if lag is not None and (type(lag) is not int or lag < 0):
            raise SetupError(
                f"delta_sync_max_lag_versions: expected a whole number of at least 0, or nothing, found {lag!r}"
            )
        for name in (
            "delta_sync_close_timeout_s",
            "delta_sync_start_timeout_s",
            "delta_sync_server_timeout_s",
            "delta_sync_lag_timeout_s",
            "delta_sync_retention_grace_s",
        ):
            _require_seconds(name, getattr(self, name), least=0.0)
        _require_factor("delta_sync_anchor_factor", self.delta_sync_anchor_factor)
        _require_seconds("delta_sync_ack_poll_s", self.delta_sync_ack_poll_s, least=0.001)

    def require_bucket(self, bucket: str | None) -> str:
        """The bucket's address, given directly or by the config; [`SetupError`] if neither or both differ."""
        if bucket and self.delta_sync_bucket and bucket != self.delta_sync_bucket:
            raise SetupError(
                f"two buckets are given: {bucket!r} directly and {self.delta_sync_bucket!r} by delta_sync_bucket; "
                "give one of them"
            )
        chosen = bucket or self.delta_sync_bucket
        if not chosen:
            raise SetupError(
                "delta weight sync is on but has no bucket; pass bucket='folder that the servers reach', or set "
                "delta_sync_bucket in the config"
            )
        return chosen


def _require_factor(name: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value <= 1e6:  # type: ignore[operator]
        raise SetupError(f"{name}: expected a number from 0 to 1e6, found {value!r}")


def _require_seconds(name: str, value: object, least: float) -> None:
    # what is longer cannot be waited for by a lock
    if type(value) not in (int, float) or not least <= value <= _MAX_WAIT_S:  # type: ignore[operator]
        raise SetupError(f"{name}: expected {least:g} to {_MAX_WAIT_S:g} seconds, found {value!r}")
