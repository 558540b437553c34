# SPDX-License-Identifier: Apache-2.0
"""All errors of the project.

    DeltaError
    ├── FormatError (ValueError)            a file, manifest or pointer breaks the format
    │   ├── UnsupportedFormatError          it is newer than this release
    │   └── SignatureError                  it is not signed by a key that is trusted
    ├── MismatchError (ValueError)          two sides that must agree do not
    │   ├── ModelMismatchError              other tensors, shapes or dtypes
    │   ├── BaseMismatchError               other bits than the base a delta names
    │   └── DigestMismatchError             the result is not the version that was announced
    ├── StoreError (OSError)                the bucket could not do what was asked
    │   ├── BucketNotFoundError             no bucket at that address
    │   ├── ObjectNotFoundError             no object of that key
    │   ├── ObjectExistsError               create-only write on a key that exists
    │   ├── StorePermissionError            access is refused; lasts until somebody grants it
    │   ├── StoreRefusedError               permanent: the same call will be refused again
    │   └── StoreUnavailableError           transient: unreachable, overloaded, full
    │       └── RateLimitedError            asked too often; says for how long to wait
    ├── WriterConflictError (RuntimeError)  another trainer writes to the same bucket
    ├── LayoutError (RuntimeError)          a live tensor is not laid out as its loader says
    └── SetupError (RuntimeError)           configuration or environment that cannot work

Every message names the object (bucket path, parameter, version), what was expected, what was found and what to do.
Errors take one string, so they survive pickling between processes.
"""


class DeltaError(Exception):
    """Base of everything this project raises on purpose.

    Attributes:
        rank (`int`, *optional*): the rank of a server that reported it.
    """

    rank: int | None = None


class FormatError(DeltaError, ValueError):
    """A file, manifest or pointer breaks the format."""


class UnsupportedFormatError(FormatError):
    """The object was written by a newer format version."""


class SignatureError(FormatError):
    """A manifest is not signed by a key that is trusted."""


class MismatchError(DeltaError, ValueError):
    """Two sides that must agree do not."""


class ModelMismatchError(MismatchError):
    """Other tensors, shapes or dtypes than expected."""


class BaseMismatchError(MismatchError):
    """The state a delta applies to is not the state at hand."""


class DigestMismatchError(MismatchError):
    """A computed digest is not the announced one."""


class StoreError(DeltaError, OSError):
    """The bucket could not do what was asked."""


class BucketNotFoundError(StoreError):
    """There is no bucket at the address."""


class ObjectNotFoundError(StoreError):
    """There is no object of that key."""


class ObjectExistsError(StoreError):
    """A create-only write met an existing object."""


class StorePermissionError(StoreError):
    """The bucket refuses access to these credentials, or there are none."""


class StoreRefusedError(StoreError):
    """The bucket refuses this call whenever it is made."""


class StoreUnavailableError(StoreError):
    """The bucket cannot be reached, is overloaded or full; trying again later may help."""


class RateLimitedError(StoreUnavailableError):
    """The bucket was asked too often.

    Args:
        message (`str`): what happened and what to do.
        retry_after_s (`float`, *optional*, defaults to 5): seconds after which the server answers again.
    """

    def __init__(self, message: str, retry_after_s: float = 5.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WriterConflictError(DeltaError, RuntimeError):
    """Another writer owns the bucket."""


class LayoutError(DeltaError, RuntimeError):
    """A live tensor cannot be patched through the loader's map."""


class SetupError(DeltaError, RuntimeError):
    """A configuration or environment that cannot work."""
