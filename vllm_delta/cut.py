# SPDX-License-Identifier: Apache-2.0
"""Whether the way to the newest version is cut for good, so that only an anchor to come leads on.

What is missing or refused at one look may be there at the next. What still is after several has been lost, and the
trainer is asked for an anchor in the server's ack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from delta_wire.errors import (
    DigestMismatchError,
    FormatError,
    ObjectNotFoundError,
    SignatureError,
    UnsupportedFormatError,
)
from delta_wire.manifest import Manifest
from vllm_delta.settings import Settings
from vllm_delta.status import Status
from vllm_delta.subscriber import Subscriber

# looks in a row, ever further apart: some 8 seconds with the default of half a second
_LOOKS = 4


class Cut:
    """Counts looks that found no way.

    Args:
        subscriber (`Subscriber`): the bucket.
        settings (`Settings`): of the server.
        status (`Status`): where it is told that an anchor is needed.
    """

    def __init__(self, subscriber: Subscriber, settings: Settings, status: Status):
        self._subscriber = subscriber
        self._settings = settings
        self._status = status
        self._looks = 0

    @contextmanager
    def noticed(self, target: Manifest) -> Iterator[None]:
        """Around what reads and checks the way to a version: errors that the bucket's content is to blame for count.

        Once an anchor is needed the error says so, too.
        """
        try:
            yield
        except (UnsupportedFormatError, SignatureError):
            # an anchor would be refused, too
            raise
        except (FormatError, ObjectNotFoundError, DigestMismatchError) as error:
            # what a rank refuses is a file on this machine
            if error.rank is None and self._is_for_good(target):
                raise type(error)(f"{error} {self._remedy()}") from error
            raise

    def over(self) -> None:
        """The server serves the newest version."""
        self._looks = 0
        self._status.needs(None)

    def _is_for_good(self, target: Manifest) -> bool:
        self._looks += 1
        asked = self._status.needs_anchor
        if asked is not None and self._subscriber.has_anchor_after(asked, target):
            # it is here; if it is lost as well, another one is needed
            self.over()
            self._looks = 1
        if self._looks < _LOOKS:
            return False
        if self._status.needs_anchor is None:
            self._status.needs(target.version)
        return True

    def _remedy(self) -> str:
        how = (
            f"the trainer is asked for one in acks/{self._settings.server_id}.json"
            if self._settings.ack
            else "the trainer is not asked for one, because DELTA_SYNC_ACK is 0, and makes the next when it is due"
        )
        return (
            f"No anchor after it leads on yet; {how}. If training has ended, restore the object, or resume training "
            "from its own last checkpoint."
        )
