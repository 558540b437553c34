# SPDX-License-Identifier: Apache-2.0
"""The `trl-delta` command, which waits after every step until its version is durable: every_version.py COMMAND ...

Without the wait, steps of a tiny model that end while a version is being published share the next one.
"""

import sys

from trl_delta import session
from trl_delta.cli import main

WAIT_S = 120
take_step = session.DeltaSyncSession.step


def step_and_wait(self: session.DeltaSyncSession, step: int) -> None:
    take_step(self, step)
    assert self.publisher.wait(WAIT_S), f"the bucket did not take the weights of step {step}"


if __name__ == "__main__":
    session.DeltaSyncSession.step = step_and_wait
    sys.exit(main())
