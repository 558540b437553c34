# SPDX-License-Identifier: Apache-2.0
"""The attention that TRL's AsyncGRPOTrainer computes with."""


def put_attention_back() -> None:
    """Undo what `cpu_training` registers for TRL 1.16; before that attention was chosen for each model."""
    try:
        from trl.experimental.async_grpo.packing import register_tree_attention
    except ImportError:
        return
    register_tree_attention()
