# SPDX-License-Identifier: Apache-2.0
"""Registration with vLLM: the few places where a released, unmodified vLLM is extended.

vLLM calls [`register`] once in every process of a server (API server, engine core, each worker). Without
`DELTA_SYNC_BUCKET` it only sees to it that a server with our worker extension does not start.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from delta_wire.errors import SetupError
from vllm_delta.settings import BUCKET, Settings

logger = logging.getLogger("vllm.vllm_delta.plugin")
_registered = False
# remote calls of vLLM's own workers that change weights
_WRITERS = {
    "load_model", "reload_weights", "start_weight_update", "update_weights", "finish_weight_update", "add_lora",
    "remove_lora",
}  # fmt: skip


def register() -> None:
    """Entry point `vllm.general_plugins`."""
    global _registered
    if _registered:
        return
    if not os.environ.get(BUCKET, "").strip():
        # where vLLM has not read its arguments, no server is started
        if "vllm.engine.arg_utils" in sys.modules:
            _check_arguments(_require_bucket)
        return
    # a setting that cannot work ends the start here, before a model is loaded
    Settings.from_env()
    _registered = True
    _check_arguments(_require_extension)
    _check_executor()
    _extend_engine_core()
    _extend_api_server()
    _refuse_in_process_engine()
    _keep_cpu_weights_plain()


def require_registered() -> None:
    """Raise [`SetupError`] with the remedy unless the plugin runs in this process."""
    if _registered:
        return
    Settings.from_env()
    raise SetupError(
        "the delta-weight-sync extension was loaded but its vLLM plugin was not, so nothing would ever update the "
        f"weights: VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS', '')!r} must contain 'vllm_delta' or be unset"
    )


def _extend_engine_core() -> None:
    """Start the driver with the engine's loop, and let the loop run its items between two steps."""
    from vllm.v1.engine import core as module

    from vllm_delta.engine import BETWEEN_STEPS

    # our functions take the place of methods that have other types
    proc: Any = module.EngineCoreProc
    run_busy_loop = proc.run_busy_loop
    handle = proc._handle_client_request

    @functools.wraps(run_busy_loop)
    def run_with_driver(core: Any) -> None:
        from vllm_delta.driver import Driver

        driver = Driver(core, _settings_of(core))
        core.delta_driver = driver
        driver.start()
        try:
            run_busy_loop(core)
        finally:
            driver.stop()

    @functools.wraps(handle)
    def handle_with_items(core: Any, request_type: Any, request: Any) -> None:
        if request_type is BETWEEN_STEPS:
            request()
        else:
            handle(core, request_type, request)

    proc.run_busy_loop = run_with_driver
    proc._handle_client_request = handle_with_items
    _watch_writers(proc)
    proc.delta_status = lambda core: core.delta_driver.status()
    proc.delta_verify = lambda core: core.delta_driver.verify()


def _watch_writers(proc: Any) -> None:
    """What else writes weights on request runs as before, and then nothing is generated until they are proven."""
    call, wake_up, resume = proc.collective_rpc, proc.wake_up, proc.resume_scheduler
    # there is no driver before the loop runs
    proc.delta_driver = None

    @functools.wraps(call)
    def call_and_suspect(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        writes = callable(method) or method in _WRITERS
        try:
            return call(core, method, *args, **kwargs)
        finally:
            # it may have failed half way
            if writes and core.delta_driver is not None:
                core.delta_driver.suspect(f"{getattr(method, '__name__', method)} was called from outside")

    @functools.wraps(wake_up)
    def wake_and_suspect(core: Any, *args: Any, **kwargs: Any) -> Any:
        slept = core.model_executor.is_sleeping
        try:
            return wake_up(core, *args, **kwargs)
        finally:
            if slept and core.delta_driver is not None:
                core.delta_driver.suspect("the engine slept")

    @functools.wraps(resume)
    def resume_unless_held(core: Any, *args: Any, **kwargs: Any) -> Any:
        result = resume(core, *args, **kwargs)
        if core.delta_driver is not None:
            core.delta_driver.hold_on()
        return result

    add, remove = proc.add_lora, proc.remove_lora

    @functools.wraps(add)
    def add_another(core: Any, lora_request: Any) -> Any:
        if core.delta_driver is not None:
            core.delta_driver.require_foreign(lora_request.lora_int_id)
            core.delta_driver.require_room(lora_request.lora_int_id)
        return add(core, lora_request)

    @functools.wraps(remove)
    def remove_another(core: Any, lora_id: int) -> Any:
        if core.delta_driver is not None:
            core.delta_driver.require_foreign(lora_id)
        return remove(core, lora_id)

    proc.add_lora, proc.remove_lora = add_another, remove_another
    proc.collective_rpc = call_and_suspect
    proc.wake_up = wake_and_suspect
    proc.resume_scheduler = resume_unless_held


def _check_arguments(check: Callable[[Any], None]) -> None:
    """Refuse a worker extension, or that there is none, before vLLM starts its first process.

    While these start vLLM loses a request to stop, and whatever they refuse comes late and far up in the log.
    """
    from vllm.engine import arg_utils

    arguments: Any = arg_utils.EngineArgs
    make = arguments.create_engine_config

    @functools.wraps(make)
    def checked(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        check(engine_args.worker_extension_cls)
        return make(engine_args, *args, **kwargs)

    arguments.create_engine_config = checked


def _require_bucket(extension: Any) -> None:
    if isinstance(extension, str) and extension.partition(".")[0] == __package__:
        require_registered()


def _require_extension(extension: Any) -> None:
    # what an extension of somebody else imports is no business of the API server
    if not extension:
        raise _without_extension(extension)


def _without_extension(found: Any) -> SetupError:
    return SetupError(
        f"{BUCKET} is set, but the server was started without our worker extension (found {found!r}): add "
        f"--worker-extension-cls vllm_delta.DeltaWorkerExtension, or unset {BUCKET}"
    )


def _check_executor() -> None:
    """Refuse what cannot be followed before the first worker starts."""
    from vllm.v1.executor import abstract

    executor_class: Any = abstract.Executor
    start = executor_class.__init__

    @functools.wraps(start)
    def checked(executor: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _require_followable(vllm_config.parallel_config)
        start(executor, vllm_config, *args, **kwargs)

    executor_class.__init__ = checked


def _require_followable(parallel_config: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_delta.worker import DeltaWorkerExtension

    name = parallel_config.worker_extension_cls
    found = resolve_obj_by_qualname(name) if isinstance(name, str) and name else name
    if not (isinstance(found, type) and issubclass(found, DeltaWorkerExtension)):
        raise _without_extension(name)
    # vLLM runs the replicas of other models as engines of their own, each with a size of 1
    if parallel_config.data_parallel_size > 1:
        raise SetupError(
            "mixture-of-experts models with data parallelism are not supported yet in this release of "
            f"delta-weight-sync: unset {BUCKET}, or serve with --data-parallel-size 1"
        )


def _settings_of(core: Any) -> Settings:
    settings = Settings.from_env()
    parallel = core.vllm_config.parallel_config
    # each replica of a data-parallel server follows the bucket on its own
    if parallel.data_parallel_index and "DELTA_SYNC_SERVER_ID" in os.environ:
        from dataclasses import replace

        settings = replace(settings, server_id=f"{settings.server_id}-dp{parallel.data_parallel_index}")
    return settings


def _extend_api_server() -> None:
    """Add our routes where vLLM registers those that every server has."""
    from vllm.entrypoints import serve

    register_routers = serve.register_vllm_serve_api_routers

    @functools.wraps(register_routers)
    def register_with_ours(app: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        from vllm_delta import routes, versions

        register_routers(app)
        routes.attach(app, Settings.from_env())
        client: Any = AsyncLLM
        if not hasattr(client, "delta_noted"):
            client.generate, client.delta_noted = versions.note_versions(client.generate), True

    serve.register_vllm_serve_api_routers = register_with_ours


def _refuse_in_process_engine() -> None:
    """An engine without a loop of its own has no place between two steps."""
    from vllm.v1.engine.core_client import InprocClient

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise SetupError(
            "delta-weight-sync needs the engine core in a process of its own: unset VLLM_ENABLE_V1_MULTIPROCESSING "
            f"(found {os.environ.get('VLLM_ENABLE_V1_MULTIPROCESSING')!r}), or unset {BUCKET}"
        )

    InprocClient.__init__ = refuse


def _keep_cpu_weights_plain() -> None:
    """On a CPU vLLM repacks linear weights after loading and drops or ignores the original; keep the original.

    The two-dimensional weights then go through PyTorch's own linear kernel.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    repack = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(repack)
    def keep(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            repack(layer, remove_weight)
        else:
            layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = keep
