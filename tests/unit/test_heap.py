# SPDX-License-Identifier: Apache-2.0
"""What a server has loaded is nothing that a garbage collection goes through while tokens are waited for."""

import subprocess
import sys

# in a process of its own, whose collector may be told anything
CODE = """
import gc
import weakref

from vllm_delta.heap import leave_heap_alone


class Node:
    pass


lost, kept = Node(), [Node() for _ in range(1000)]
lost.itself = lost
seen = weakref.ref(lost)
del lost
leave_heap_alone()
assert seen() is None, "garbage was kept for good"
left = {id(thing) for thing in gc.get_objects()}
assert not left & {id(node) for node in kept}
print(gc.get_freeze_count() > 1000)
"""


def test_what_is_there_is_left_alone_and_garbage_is_freed_before():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_the_ranks_of_a_server_do_it_too(tmp_path, monkeypatch):
    from fake_server import FakeEngine, FakeWorker, write_checkpoint

    from vllm_delta import worker
    from vllm_delta.ranks import Ranks

    asked = []
    monkeypatch.setattr(worker, "leave_heap_alone", lambda: asked.append(None))
    base = write_checkpoint(tmp_path / "base")
    ranks = Ranks(FakeEngine([FakeWorker(base), FakeWorker(base)]))
    ranks.trace()
    ranks.job("leave_heap_alone")
    assert len(asked) == 2
