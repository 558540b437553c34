# SPDX-License-Identifier: Apache-2.0
"""What AsyncGRPOTrainer of TRL 1.14 to 1.16 needs to train on a CPU. None of it is active where there is a GPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from delta_wire.errors import SetupError

if TYPE_CHECKING:
    import torch


@contextmanager
def cpu_training() -> Iterator[None]:
    """Construct an `AsyncGRPOTrainer` inside this context to train it on a CPU.

    Pass `AsyncGRPOConfig(use_cpu=True, bf16=False)`: its default is bf16 autocast, which transformers refuses
    without a GPU.

    Raises:
        [`~delta_wire.errors.SetupError`]: where CUDA is available, or this TRL needs Triton's interpreter.
    """
    import torch

    if torch.cuda.is_available():
        raise SetupError("cpu_training: this machine has a GPU; construct the trainer without it")
    trainers: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    _require_head()
    tree = _tree_attention()
    replaced: dict[str, Callable[..., Any]] = {}
    if hasattr(trainers, "get_peak_flops_per_device"):
        # since 1.15 the constructor asks CUDA for the device's name to look up its peak speed; None is TRL's own
        # answer for a device it does not know, and only the MFU metrics go missing
        replaced["get_peak_flops_per_device"] = lambda *args, **kwargs: None
    if tree is None:
        # before 1.16 samples lie in a row one after the other. The attention that the constructor asks for is fetched
        # from the hub and exists for Hopper GPUs only; in a row without padding transformers' own keeps them apart by
        # their positions
        replaced["create_model_from_path"] = partial(_with_plain_attention, trainers.create_model_from_path)
    own = {name: getattr(trainers, name) for name in replaced}
    vars(trainers).update(replaced)
    try:
        yield
    finally:
        vars(trainers).update(own)
    if tree is not None:
        # TRL's attention over packed prefix trees calls the same kernel. The constructor registers it, so this comes
        # after; plain attention would let samples see each other
        from transformers import AttentionInterface

        AttentionInterface.register(tree, sdpa_tree_attention)


def _tree_attention() -> str | None:
    """Name of the attention over prefix trees; `None` for a TRL that packs no trees."""
    try:
        from trl.experimental.async_grpo.packing import TREE_ATTENTION
    except ImportError:
        return None
    return TREE_ATTENTION


def _with_plain_attention(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return create(*args, **kwargs | {"attn_implementation": "sdpa"})


def _require_head() -> None:
    """TRL 1.15 computes log probabilities by Triton wherever it is installed; 1.14 and 1.16 know a way without."""
    try:
        head: Any = importlib.import_module("trl.kernels.chunked_logprob")
    except ImportError:
        return
    if not hasattr(head, "_use_triton") and os.environ.get("TRITON_INTERPRET") != "1":
        raise SetupError(
            "TRL 1.15 computes log probabilities by Triton also where there is no GPU; set TRITON_INTERPRET=1 in the "
            "environment before training starts, or install TRL 1.14 or 1.16"
        )


def sdpa_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over samples folded into a prefix tree, by PyTorch's own attention and a mask.

    Letters: `H` heads, `G` key/value heads, `N` packed tokens, `D` head size, `S` segments of the tree, `P` tokens of
    all root-to-segment paths.

    Args:
        query (`torch.Tensor`): `[1, H, N, D]`.
        key, value (`torch.Tensor`): `[1, G, N, D]`.
        attention_mask: unused; the tree says who sees whom.
        tree_kv_index (`torch.Tensor`): `[P]`, packed position of each token of the paths, end to end.
        tree_cu_seqlens_q (`torch.Tensor`): `[S + 1]`, where segments begin in the row.
        tree_cu_seqlens_k (`torch.Tensor`): `[S + 1]`, where their paths begin in `tree_kv_index`.
        scaling (`float`, *optional*): of the logits.

    Returns:
        `(output, None)`: `[1, N, H, D]`.
    """
    from torch.nn.functional import scaled_dot_product_attention

    if sliding_window is not None or softcap is not None:
        raise SetupError(
            f"{type(module).__name__}: attention with a sliding window or a soft cap is not part of the CPU training "
            "mode; use a model with full attention, or a GPU"
        )
    mask = tree_mask(query.shape[2], tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2), None


def tree_mask(
    num_tokens: int, kv_index: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> torch.Tensor:
    """Who sees whom: `[N, N]` bool, true where the row's token has the column's token on its path, up to itself."""
    import torch

    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=kv_index.device)
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(bounds_q) - 1):
        mask[bounds_q[i] : bounds_q[i + 1], kv_index[bounds_k[i] : bounds_k[i + 1]]] = True
    # a path ends with its own segment, which lies in the row in order: within it a token sees those before it, and
    # what precedes the segment on the path also precedes it in the row
    return mask.tril()
