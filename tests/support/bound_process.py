# SPDX-License-Identifier: Apache-2.0
"""A process whose first thread OpenMP has bound to one core, as vLLM does with its workers on a CPU."""

import json
import multiprocessing
import os
import sys
import threading


def _look(core: int) -> None:
    import torch

    from delta_wire import kernels

    torch.ones(2)
    found: dict[str, object] = {"bound": kernels.bound_cores()}

    def note(name: str, *actions) -> None:
        for action in actions:
            action()
        inherits = threading.Thread(target=lambda: found.update({name: sorted(os.sched_getaffinity(0))}))
        inherits.start()
        inherits.join()

    for name, actions in {
        "as made": (),
        "unbound": (kernels.unbind_thread,),
        "off": (lambda: kernels.keep_off([core]),),
        "off all": (kernels.unbind_thread, lambda: kernels.keep_off(range(os.cpu_count() or 1))),
        "off none": (lambda: kernels.keep_off([]),),
    }.items():
        thread = threading.Thread(target=note, args=(name, *actions))
        thread.start()
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    first = min(os.sched_getaffinity(0))
    if "bind" in sys.argv:
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_PLACES": f"{{{first}}}", "OMP_PROC_BIND": "true"}
    child = multiprocessing.get_context("spawn").Process(target=_look, args=(first,))
    child.start()
    child.join()
