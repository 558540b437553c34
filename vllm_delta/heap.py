# SPDX-License-Identifier: Apache-2.0
"""What loading has left on Python's heap, out of the way of its garbage collector."""

from __future__ import annotations

import gc


def leave_heap_alone() -> None:
    """Never look again at the objects that exist now; what nobody refers to any more is freed first.

    vLLM does the same when an engine has started. What is compiled and mapped after that, a heap as large again, would
    be gone through by the collector some time later, in the middle of a step, which holds every token up for half a
    second. Costs about that once, while a server starts.
    """
    gc.collect()
    gc.freeze()
