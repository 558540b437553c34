# SPDX-License-Identifier: Apache-2.0
"""A bucket in a local (or mounted) folder."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO

from delta_wire.errors import (
    BucketNotFoundError,
    DeltaError,
    FormatError,
    ObjectNotFoundError,
    SetupError,
    StorePermissionError,
    StoreRefusedError,
    StoreUnavailableError,
)
from delta_wire.files import COPY_BYTES, TEMPORARY_PREFIX, arriving, staging, sync_folder, temporary_beside
from delta_wire.stores.base import ObjectInfo, check_key, exists_already, is_key, no_object, too_large

_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
# a temporary file that nobody has written to for so long
_ABANDONED_S = 3600.0
# what a file system without hard links answers
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """Bucket in a folder. Objects are written under a temporary name, synced and renamed, so a crash leaves none torn.

    A folder that has vanished is never created again behind the user's back: every call raises
    [`~delta_wire.errors.BucketNotFoundError`] until somebody calls `ensure()`.

    Args:
        root (`Path`): the folder.
    """

    create_only = True
    least_listing_s = 0.0

    def __init__(self, root: Path):
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)

    def ensure(self) -> None:
        with self._errors("", "create the bucket"):
            try:
                self.root.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise SetupError(f"{self.url}: {self._obstacle() or 'a part of the path is no folder'}") from None
            self._sweep()

    def watch(self, prefix: str, on_change: Callable[[], None]) -> Callable[[], None] | None:
        """There is no feed of changes."""
        return None

    def close(self) -> None:
        """Nothing to give back."""

    def get(self, key: str, max_bytes: int) -> bytes:
        with self._errors(key, "read"), self._open(key, max_bytes) as (file, size_bytes):
            data = file.read(size_bytes + 1)
            if len(data) != size_bytes:
                raise self._changed(key, size_bytes, len(data))
        return data

    def get_file(self, key: str, path: Path, max_bytes: int) -> None:
        with self._errors(key, "read"), self._open(key, max_bytes) as (file, size_bytes), arriving(path) as out:
            with staging(path):
                shutil.copyfileobj(file, out, COPY_BYTES)
            if out.tell() != size_bytes:
                raise self._changed(key, size_bytes, out.tell())

    def put(self, key: str, data: bytes | Path, *, create_only: bool = False) -> None:
        path = self._path(key)
        if create_only and os.path.lexists(path):
            raise exists_already(self.url, key)
        # a source that cannot be opened is the caller's fault, not the bucket's
        source = data.open("rb") if isinstance(data, Path) else BytesIO(data)
        with source, self._errors(key, "write"):
            self._make_parents(path)
            temporary = temporary_beside(path)
            try:
                with temporary.open("xb") as out:
                    shutil.copyfileobj(source, out, COPY_BYTES)
                    out.flush()
                    os.fsync(out.fileno())
                if create_only:
                    self._link(temporary, path, key)
                else:
                    os.replace(temporary, path)
                sync_folder(path.parent)
            finally:
                temporary.unlink(missing_ok=True)

    def list(self, prefix: str) -> list[ObjectInfo]:
        with self._errors(prefix, "list"):
            self._require_root()
            # only the folder that a matching key must lie in is walked
            folder = prefix.rpartition("/")[0]
            if folder and not is_key(folder):
                return []
            found = [info for info in self._walk(folder) if info.key.startswith(prefix)]
        return sorted(found, key=lambda info: info.key)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [(key, self._path(key)) for key in keys]
        for key, path in paths:
            with self._errors(key, "delete"):
                self._require_root()
                path.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with self._errors(key, "look for"):
            try:
                return stat.S_ISREG(os.lstat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                self._require_root()
                return False

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*check_key(key, self.url).split("/"))

    def _require_root(self) -> None:
        if not self.root.is_dir():
            raise BucketNotFoundError(
                f"{self.url}: "
                + (
                    self._obstacle()
                    or "there is no such folder, so there is no bucket; check the path, mount it again, or let the "
                    "trainer create it at its start"
                )
            )

    def _obstacle(self) -> str | None:
        """What stands where the bucket should be."""
        if self.root.is_symlink() and not self.root.exists():
            return (
                f"the path is a symbolic link to {os.readlink(self.root)}, which does not exist; create or mount that "
                "folder, or remove the link"
            )
        if os.path.lexists(self.root):
            return "a file is where the bucket should be; name a folder"
        return None

    def _sweep(self) -> None:
        """Remove temporary files of writers that were killed; one at work touches its own all the time."""
        with tempfile.TemporaryFile(dir=self.root) as probe:
            # by the clock of the file system, which may be another machine's
            now_s = os.fstat(probe.fileno()).st_mtime
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    if name.startswith(TEMPORARY_PREFIX) and now_s - os.lstat(path).st_mtime > _ABANDONED_S:
                        os.unlink(path)

    def _inside(self, folder: Path) -> bool:
        real = os.path.realpath(folder)
        root = os.path.realpath(self.root)
        return real == root or real.startswith(root.rstrip(os.sep) + os.sep)

    def _make_parents(self, path: Path) -> None:
        self._require_root()
        folder = self.root
        for part in path.relative_to(self.root).parts[:-1]:
            parent, folder = folder, folder / part
            try:
                # not makedirs: that would bring a vanished root back
                folder.mkdir()
            except FileExistsError:
                continue
            sync_folder(parent)
        if not self._inside(path.parent):
            raise FormatError(f"{self.url}: {path.parent} leads out of the bucket through a symbolic link; remove it")

    @contextmanager
    def _open(self, key: str, max_bytes: int) -> Iterator[tuple[IO[bytes], int]]:
        path = self._path(key)
        # no links and no waiting on a pipe: whoever can write the bucket must not choose what else is read
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or not self._inside(path.parent):
                raise self._foreign(key)
            if status.st_size > max_bytes:
                raise too_large(self.url, key, status.st_size, max_bytes)
            with os.fdopen(handle, "rb", closefd=False) as file:
                yield file, status.st_size
        finally:
            os.close(handle)

    def _walk(self, folder: str) -> Iterator[ObjectInfo]:
        try:
            entries = list(os.scandir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if not is_key(key):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                # removed since the folder was read
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(key)
            elif stat.S_ISREG(status.st_mode):
                yield ObjectInfo(key, status.st_size)

    def _link(self, temporary: Path, path: Path, key: str) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise exists_already(self.url, key) from None
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise SetupError(
                    f"{self.url}: the file system has no hard links ({error.strerror}), which keep a second trainer "
                    "from writing to the same bucket; put the bucket on another file system"
                ) from error
            raise

    def _foreign(self, key: str) -> FormatError:
        return FormatError(
            f"{self.url}/{key}: expected a regular file inside the bucket, found a folder, link or device; remove it"
        )

    def _changed(self, key: str, expected_bytes: int, found_bytes: int) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.url}/{key}: expected {expected_bytes} bytes, read {found_bytes}; the file changed meanwhile"
        )

    @contextmanager
    def _errors(self, key: str, action: str) -> Iterator[None]:
        """Translate what the operating system says into the errors of a store."""
        try:
            yield
        except DeltaError:
            raise
        except FileNotFoundError:
            self._require_root()
            if action == "write":
                raise StoreUnavailableError(
                    f"{self.url}/{key}: cannot write: its folder was removed meanwhile; stop what cleans up the bucket"
                ) from None
            raise no_object(self.url, key) from None
        except NotADirectoryError as error:
            self._require_root()
            raise ObjectNotFoundError(f"{self.url}/{key}: {error.filename} is no folder") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._foreign(key) from None
            said = f"{self.url}/{key}: cannot {action}: {error.strerror or error}"
            if error.errno in _NO_ACCESS:
                raise StorePermissionError(
                    f"{said}; give the user {os.getuid()} of this process access to the bucket's folder"
                ) from error
            if error.errno == errno.ENAMETOOLONG:
                raise StoreRefusedError(
                    f"{said}; the file system of the bucket does not take names this long"
                ) from error
            raise StoreUnavailableError(f"{said}; check the bucket's folder and its free space") from error
