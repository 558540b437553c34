# SPDX-License-Identifier: Apache-2.0
"""How the run's adapter is known inside a server: in vLLM's lists of adapters, and in labels."""

from __future__ import annotations

# far from what vLLM's own counter of adapters reaches
ADAPTER_ID = 0x0DE17A
# of the request that an API server makes: nothing lies there, so that nothing but us ever loads this adapter
NO_PATH = "/delta-weight-sync"
# how vLLM calls weights that nothing has replaced
UNCHANGED = "default"


def adapter_label(version: str, name: str) -> str:
    """How vLLM labels what it generates, by whatever model, while a version of an adapter is in place."""
    return f"{version}@{name}"


def version_for(label: str, adapter: str | None) -> str:
    """What a label means for a request: an adapter's versions are none of the base model's.

    Args:
        label (`str`): a version, or one with an adapter.
        adapter (`str`, *optional*): the run's, if the request asked for it; `None` for the model itself and for other
            adapters.
    """
    version, at, name = label.partition("@")
    return label if not at else version if name == adapter else UNCHANGED
