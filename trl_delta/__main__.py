# SPDX-License-Identifier: Apache-2.0
"""`python -m trl_delta`, and `accelerate launch -m trl_delta` for several processes."""

import sys

from trl_delta.cli import main

sys.exit(main())
