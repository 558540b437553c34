# SPDX-License-Identifier: Apache-2.0
"""What of a training model is published: its weights, or its adapter alone, and the files that belong to them."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from delta_wire import kernels
from delta_wire.adapter import Adapter
from delta_wire.checkpoint import Checkpoint
from delta_wire.encodings.warm import warm_up
from delta_wire.errors import SetupError
from delta_wire.state import OldBits, TensorTable
from trl_delta.base import base_checkpoint, require_base, save_anchor, save_files
from trl_delta.config import DeltaSyncConfig
from trl_delta.detector import Detector
from trl_delta.gathering import WholeFactors
from trl_delta.joint import agreed_digest, gather_bits, owned
from trl_delta.names import LiveTensor, Naming, table_of
from trl_delta.ranks import Ranks
from trl_delta.separate import SeparateAdapter
from trl_delta.shards import refuse_wrappers
from trl_delta.snapshot import choose, training_bytes
from trl_delta.wrappers import unwrap

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


class Content:
    """A model as it is published; found out once, by all training processes together.

    Args:
        model (`torch.nn.Module`): the training model, replicated or sharded.
        config ([`DeltaSyncConfig`]): settings.
        ranks ([`~trl_delta.ranks.Ranks`]): of the training.
        processing_class (*optional*): tokenizer or processor, for checkpoints that are uploaded.

    Attributes:
        table ([`~delta_wire.state.TensorTable`]): all tensors of a version.
        detector ([`Detector`]): of what this process owns.
        num_owned (`int`): elements that this process owns.
        digest ([`~delta_wire.digest.Digest`]): of the whole state at the start.
        reference (`str`, *optional*): the checkpoint that a run may begin with by its name.
    """

    table: TensorTable
    detector: Detector
    num_owned: int
    reference: str | None
    _base: Checkpoint | None
    _factors: WholeFactors
    _naming: Naming | SeparateAdapter

    def __init__(
        self,
        model: torch.nn.Module,
        config: DeltaSyncConfig,
        ranks: Ranks,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    ):
        self._model = model
        self._ranks = ranks
        self._processing_class = processing_class
        self._separate: SeparateAdapter | None = None
        ranks.all_do(lambda: self._take_names(config))
        if self._separate is not None:
            separate, base_digest = self._separate, self._separate.agree_on_base()
            ranks.all_do(lambda: separate.require_base(base_digest))
            # version 0 is an adapter, which is nowhere yet
            self.reference = self._base = None
        ranks.all_do(lambda: self._take_bits(config.delta_sync_snapshot))
        self.digest = agreed_digest(ranks, self.table, self.detector.digest)

    @property
    def adapter(self) -> Adapter | None:
        """What servers must know of a run that publishes an adapter alone."""
        return None if self._separate is None else self._separate.described

    @property
    def is_base_digest(self) -> bool:
        """Whether the state is that of the checkpoint [`Content.reference`], in every bit."""
        return self._base is not None and self._base.digest() == self.digest

    @property
    def needs_all(self) -> bool:
        """Whether looking at the weights takes all processes; see [`~trl_delta.gathering.WholeFactors`]."""
        return self._factors.needed

    def live(self) -> list[LiveTensor]:
        """The model's tensors as they are now, under their checkpoint names. Called by all processes."""
        live = self._factors.of(self._read)
        assert live is not None, "it is this process' turn"
        return live

    def own(self, turn: bool = True) -> list[LiveTensor] | None:
        """What of them this process looks at and publishes; `None` if it is not its `turn`.

        Called by all processes after the same step if [`Content.needs_all`].
        """
        live = self._factors.of(self._read, turn)
        return None if live is None else owned(live, self._ranks)

    def pieces(self) -> list[LiveTensor]:
        """As [`Content.own`], to be asked for names and places only: without the other processes."""
        return owned(self._read(), self._ranks)

    def gather_bits(self) -> dict[str, np.ndarray]:
        """All bits of the model's tensors, on the first process only; called by all."""
        return gather_bits(self.live(), self._ranks)

    def _read(self) -> list[LiveTensor]:
        return self._naming.live(self._model)

    def with_kept(self, bits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The bits of a whole state, given those of the model's tensors."""
        return bits | self._kept_bits()

    def last_bits(self) -> OldBits:
        """Tensors of the last extraction by checkpoint name, copied one at a time. On one process only."""
        entries = {name: entry for entry in self._read() for name in entry.names}
        return lambda name: self.detector.bits(entries[name]) if name in entries else self.kept_bits(name)

    def kept_bits(self, name: str) -> np.ndarray:
        """A tensor of the checkpoint that the model does not hold, so that it is never changed."""
        if self._base is None or name not in self._naming.kept:
            raise SetupError(f"the tensor {name} is neither the model's nor its checkpoint's")
        return self._base.bits(name)

    def save_files(self, folder: Path) -> None:
        """Write what an anchor needs beside the weights."""
        if self._separate is not None:
            self._separate.save_files(folder, self._model)
        else:
            others = {self._base} if self._base is not None and self._naming.kept else set()
            save_files(folder, others, unwrap(self._model), self._processing_class)

    def save(self, folder: Path, bits: dict[str, np.ndarray]) -> None:
        """Write a checkpoint, given the bits of the model's tensors."""
        if self._separate is not None:
            self._separate.save(folder, bits, self._model)
        else:
            others = {} if self._base is None else dict.fromkeys(self._naming.kept, self._base)
            save_anchor(folder, bits, others, unwrap(self._model), self._processing_class)

    def require_base_unmoved(self) -> None:
        """Raise [`~delta_wire.errors.BaseMismatchError`] if what lies below a separate adapter has changed here."""
        if self._separate is not None:
            self._separate.require_base_unmoved(self._model)

    def _take_names(self, config: DeltaSyncConfig) -> None:
        """Find out what the model holds."""
        refuse_wrappers(self._model)
        kernels.warm_up()
        warm_up()
        self.reference, self._base = base_checkpoint(self._model)
        self._find_table(config)
        self._factors = WholeFactors(self._read())

    def _find_table(self, config: DeltaSyncConfig) -> None:
        if config.delta_sync_adapter == "separate":
            self._naming = self._separate = SeparateAdapter(
                self._model, config, self.reference, self._base, ranks=self._ranks
            )
            self.table = table_of(self._read())
            return
        base_table = None if self._base is None else self._base.table()
        self._naming = Naming(self._model, base_table)
        kept = [] if base_table is None else [base_table[name] for name in self._naming.kept]
        self.table = table_of(self._read(), kept)
        if base_table is not None:
            require_base(base_table, self.table, self.reference)

    def _take_bits(self, snapshot: str) -> None:
        """Remember the bits of what this process owns."""
        live = self.live()
        own = owned(live, self._ranks)
        # what nobody trains is counted once
        kept = self._kept_bits() if self._ranks.is_first else {}
        self.num_owned = sum(prod(entry.shape) * len(entry.names) for entry in own)
        self.num_owned += sum(array.size for array in kept.values())
        self.detector = Detector(own, kept, choose(snapshot, own, to_come_bytes=training_bytes(live)))

    def _kept_bits(self) -> dict[str, np.ndarray]:
        base = self._base
        return {} if base is None else {name: base.bits(name) for name in self._naming.kept}
