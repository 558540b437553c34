# SPDX-License-Identifier: Apache-2.0
"""Where the `delta-wire` command begins, also as `python -m delta_wire`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; Ctrl-C is a clean end while modules are still being loaded, too."""
    try:
        from delta_wire.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
