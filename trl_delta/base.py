# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a run starts from: the one the model was loaded from, or one of its own."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from delta_wire.checkpoint import SINGLE_FILE, Checkpoint, resolve_reference
from delta_wire.container import write_tensors
from delta_wire.errors import FormatError, ModelMismatchError, SetupError
from delta_wire.state import DTYPE, TensorTable
from trl_delta.wrappers import unwrap

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)


def base_checkpoint(model: torch.nn.Module) -> tuple[str | None, Checkpoint | None]:
    """The checkpoint that a model was loaded from, if it is at hand and in bf16."""
    model = unwrap(model)
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or getattr(model, "name_or_path", None)
    if not name:
        return None, None
    commit = getattr(config, "_commit_hash", None)
    if Path(name).is_dir():
        reference = str(Path(name).resolve())
    elif commit:
        reference = f"{name}@{commit}"
    else:
        return None, None
    try:
        base = Checkpoint(resolve_reference(reference))
        base.table()
    except (SetupError, FormatError, ModelMismatchError) as error:
        logger.info("delta sync: cannot refer to the checkpoint %s: %s", reference, error)
        return reference, None
    return reference, base


def require_base(base: TensorTable, found: TensorTable, reference: str | None) -> None:
    try:
        base.require_same(found, f"the checkpoint {reference}", "the training model")
    except ModelMismatchError as error:
        raise ModelMismatchError(
            f"{error} If the model is meant to differ from it (more tokens, other layers), save it with "
            "save_pretrained() and start trainer and servers from that folder."
        ) from error


def save_anchor(
    folder: Path,
    bits: dict[str, np.ndarray],
    kept: dict[str, Checkpoint],
    model: torch.nn.Module,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
) -> None:
    """Write what `from_pretrained` and `vllm serve` open: the weights in bf16 with config and tokenizer.

    Args:
        bits (`dict`): of the model's tensors, uint16 in their shapes.
        kept (`dict`): checkpoint of each tensor that the model does not hold. The model is a part of that checkpoint
            then, and the configuration is that of the whole.
    """
    tensors = {name: (DTYPE, array.shape, array) for name, array in bits.items()}
    tensors |= {name: (DTYPE, base.spec(name)[1], base.bits(name)) for name, base in kept.items()}
    write_tensors(folder / SINGLE_FILE, tensors, {"format": "pt"})
    save_files(folder, set(kept.values()), model, processing_class)


def save_files(
    folder: Path,
    kept: set[Checkpoint],
    model: torch.nn.Module,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
) -> None:
    """Write what belongs to a checkpoint beside the weights: configuration, tokenizer, templates.

    Args:
        kept (set of `Checkpoint`): checkpoints that the model is a part of, whose files win.
    """
    config = getattr(model, "config", None)
    if config is not None:
        import torch

        config = copy.deepcopy(config)
        config.dtype = torch.bfloat16
        config.architectures = config.architectures or [type(model).__name__]
        config.save_pretrained(folder)
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    for base in kept:
        for name in base.other_files():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(base.folder / name, folder / name)
