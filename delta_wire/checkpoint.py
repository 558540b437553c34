# SPDX-License-Identifier: Apache-2.0
"""A model checkpoint in a folder, as `save_pretrained` writes it, by its raw bits."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np

from delta_wire.adapter import Adapter
from delta_wire.container import TensorFile
from delta_wire.digest import Digest, digest_tensor
from delta_wire.errors import FormatError, ModelMismatchError, SetupError
from delta_wire.state import DTYPE, TensorSpec, TensorTable
from delta_wire.strict import load_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# as PEFT writes them
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MAX_INDEX_BYTES = 256 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.safetensors")
# files that carry weights or a trainer's state: a checkout must not mix them with its own
_WEIGHT_SUFFIXES = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack",
    ".onnx", ".ot", ".npz", ".ckpt",
)  # fmt: skip
# subfolders that belong to a checkpoint's tokenizer
_SUBFOLDERS = ("additional_chat_templates",)
_HUB_REFERENCE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?)@([A-Za-z0-9][A-Za-z0-9._/-]*)"
)


def file_for_all(adapter: Adapter | None) -> str | None:
    """Name of the one file that has all tensors of an adapter, as PEFT has it; `None` for models, which may take
    several."""
    return None if adapter is None else ADAPTER_FILE


class Checkpoint:
    """Weights of a folder, mapped into memory.

    Args:
        folder (`Path`): holds `model.safetensors`, or shards and `model.safetensors.index.json`, or what PEFT
            saves of an adapter.
        private (`bool`, *optional*, defaults to `False`): arrays can be written to without changing the files.
        in_place (`bool`, *optional*, defaults to `False`): arrays can be written to, which changes the files.
    """

    def __init__(self, folder: str | Path, *, private: bool = False, in_place: bool = False):
        self.folder = Path(folder)
        try:
            self.layout = _read_layout(self.folder)
            files = {
                file: TensorFile(self.folder / file, private=private, in_place=in_place)
                for file in dict.fromkeys(self.layout.values())
            }
        except FileNotFoundError as error:
            raise SetupError(f"{self.folder}: {error.filename} is missing; the checkpoint is not complete") from error
        except OSError as error:
            raise SetupError(f"{self.folder}: cannot read the checkpoint: {error}") from error
        if not self.layout:
            raise FormatError(f"{self.folder / SINGLE_FILE}: the checkpoint has no tensors")
        self._files = files
        self._check_layout()

    def _check_layout(self) -> None:
        for name, file in self.layout.items():
            if name not in self._files[file]:
                raise FormatError(f"{self.folder / INDEX_FILE}: tensor {name} is not in {file}; the index is stale")
        for file, tensors in self._files.items():
            extra = [name for name in tensors.names() if self.layout.get(name) != file]
            if extra:
                raise FormatError(
                    f"{self.folder / file}: tensor {extra[0]} is not listed for this file in {INDEX_FILE} "
                    f"({len(extra)} such tensors); save the checkpoint again"
                )

    def table(self) -> TensorTable:
        """All tensors; [`ModelMismatchError`] naming those that are not bf16."""
        other = [f"{name} is {dtype}" for name in self.layout if (dtype := self.spec(name)[0]) != DTYPE]
        if other:
            raise ModelMismatchError(
                f"{self.folder}: this release carries states of {DTYPE} tensors only, found {len(other)} others: "
                f"{', '.join(other[:8])}. Save the model with dtype=bfloat16."
            )
        return TensorTable(TensorSpec(name, self.spec(name)[1]) for name in self.layout)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """safetensors dtype and shape of a tensor."""
        return self._files[self.layout[name]].spec(name)

    def bits(self, name: str) -> np.ndarray:
        """uint16 patterns of a bf16 tensor in its own shape, without a copy."""
        if self.spec(name)[0] != DTYPE:
            raise ModelMismatchError(f"{self.folder}: tensor {name} is {self.spec(name)[0]}, expected {DTYPE}")
        return self._files[self.layout[name]].array(name)

    def digest(self) -> Digest:
        """Digest of the state; reads all weights once."""
        total = Digest()
        for name in self.table():
            total = total + digest_tensor(name, self.bits(name))
        return total

    def other_files(self) -> list[str]:
        """Relative paths of everything that is not weights: configuration, tokenizer, chat templates, code."""
        return other_files(self.folder)

    def copy_to(self, folder: Path) -> None:
        """Copy everything that belongs to the checkpoint into an existing folder."""
        for name in (*self.other_files(), *self.weight_files()):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.folder / name, folder / name)

    def weight_files(self) -> list[str]:
        """Names of the files that hold the weights, and of their index."""
        names = sorted(set(self.layout.values()))
        return [*names, INDEX_FILE] if (self.folder / INDEX_FILE).is_file() else names


def other_files(root: Path) -> list[str]:
    """Relative paths of everything in a checkpoint's folder that is not weights."""
    found = []
    for folder in (root, *(root / name for name in _SUBFOLDERS)):
        if not folder.is_dir():
            continue
        for path in folder.iterdir():
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_SUFFIXES):
                found.append(path.relative_to(root).as_posix())
    return sorted(found)


def _read_layout(folder: Path) -> dict[str, str]:
    """File of every tensor."""
    if not folder.is_dir():
        raise SetupError(f"{folder}: there is no such folder; expected a checkpoint")
    index = folder / INDEX_FILE
    if index.is_file():
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise FormatError(f"{index}: {index.stat().st_size} bytes are no index")
        layout = load_object(index.read_bytes(), str(index), MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(layout, dict) or not layout:
            raise FormatError(f"{index}: expected a weight_map of tensor names to files, found {layout!r:.80}")
        for name, file in layout.items():
            if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
                raise FormatError(f"{index}: tensor {name[:80]}: {file!r:.80} is no file name of this folder")
        return layout
    single = folder / SINGLE_FILE
    if not single.is_file() and (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_FILE).is_file():
        single = folder / ADAPTER_FILE
    if not single.is_file():
        raise SetupError(
            f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; save the model with save_pretrained() as "
            "safetensors"
        )
    return dict.fromkeys(TensorFile(single).names(), single.name)


def resolve_reference(reference: str) -> Path:
    """Folder of a checkpoint that an anchor refers to.

    Args:
        reference (`str`): a local folder, or `repo@revision`, which is looked up in the local cache of the hub and
            downloaded if it is not there.
    """
    # not Path.is_dir, which raises for text that cannot be a path
    if os.path.isdir(reference):
        return Path(reference)
    match = _HUB_REFERENCE.fullmatch(reference)
    # the hub's cache makes a path out of it
    if not match or ".." in reference:
        raise SetupError(
            f"the anchor's reference {reference!r} is no folder on this machine and not of the form repo@revision; "
            "put the checkpoint there, or pass a copy of it (delta-wire: --base DIR)"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SetupError(f"{reference}: install huggingface_hub to read a checkpoint of the hub") from error
    try:
        # hub errors have no common base
        return Path(
            snapshot_download(match[1], revision=match[2], ignore_patterns=["*.bin", "*.pt", "*.gguf", "*.h5"])
        )
    except Exception as error:
        raise SetupError(
            f"{reference}: cannot get this checkpoint from the hub or its local cache: {type(error).__name__}: "
            + " ".join(str(error).split())
        ) from error
