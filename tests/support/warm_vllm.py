# SPDX-License-Identifier: Apache-2.0
"""vLLM's command with everything imported: each server is a fork of this process and answers within seconds.

    python warm_vllm.py < one JSON object per server: {"argv", "env", "cwd", "log"} > its process id

A server takes most of its start for importing, once in each of its processes. What runs in the fork is `vllm serve`
itself; its engine core and its workers are forks in turn. Only tests that start many servers use it; others start the
command as everybody does.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import types

_PR_SET_PDEATHSIG = 1
_NEEDED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)


def _import_all() -> None:
    for name in _NEEDED:
        importlib.import_module(name)
    from vllm.utils import system_utils

    fork = multiprocessing.get_context("fork")
    choose = system_utils.get_mp_context
    # on a CPU vLLM starts its processes anew, because their threads are bound by variables; here there is one thread
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and vars(module).get("get_mp_context") is choose:
            vars(module)["get_mp_context"] = lambda: fork


def _serve(order: dict) -> None:
    """In the fork: become `vllm serve`."""
    os.setsid()
    # ends with the process that forks, and that one with the tests
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[:0] = order["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = order["argv"]
    from vllm.entrypoints.cli.main import main

    sys.exit(main())


def _main() -> None:
    _import_all()
    # nobody waits for the servers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        # a fork has no thread but the one that forks
        assert threading.active_count() == 1, threading.enumerate()
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _serve(order)
        print(pid, flush=True)


if __name__ == "__main__":
    _main()
