# SPDX-License-Identifier: Apache-2.0
"""What the plugin does to a released vLLM, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

WITHOUT_BUCKET = """
import sys
from vllm_delta import plugin
plugin.register()
assert not {"vllm", "torch", "fastapi"} & set(sys.modules), "registration was not free"
try:
    import vllm_delta
    vllm_delta.DeltaWorkerExtension
except Exception as error:
    print(type(error).__name__, error)
"""

WITHOUT_PLUGIN = """
import vllm_delta
try:
    vllm_delta.DeltaWorkerExtension
except Exception as error:
    print(type(error).__name__, error)
"""

BAD_SETTING = """
from vllm_delta import plugin
try:
    plugin.register()
except Exception as error:
    print(type(error).__name__, error)
"""

WITH_BUCKET = """
import types
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm_delta
from vllm.utils.import_utils import resolve_obj_by_qualname
extension = resolve_obj_by_qualname("vllm_delta.DeltaWorkerExtension")
from vllm_delta.worker import DeltaWorkerExtension
assert extension is DeltaWorkerExtension

# names: all with our prefix, none that a worker has
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase
names = [name for name in dir(extension) if not name.startswith("__")]
assert len(names) == 8 and all(name.startswith("delta_") for name in names), names
for worker in (WorkerBase, Worker, CPUWorker):
    assert not [name for name in names if hasattr(worker, name)]

# the loop runs our items between two steps and everything else as before
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm_delta.engine import BETWEEN_STEPS
done = []
EngineCoreProc._handle_client_request(None, BETWEEN_STEPS, lambda: done.append(1))
EngineCoreProc._handle_client_request(None, EngineCoreRequestType.WAKEUP, None)
assert done == [1]
assert callable(EngineCoreProc.delta_status) and callable(EngineCoreProc.delta_verify)

def refused(call, text):
    try:
        call()
    except Exception as error:
        assert type(error).__name__ == "SetupError" and text in str(error), error
    else:
        raise AssertionError("not refused: " + text)

from vllm.v1.engine.core_client import InprocClient
refused(lambda: InprocClient(), "VLLM_ENABLE_V1_MULTIPROCESSING")
from vllm.v1.executor.uniproc_executor import UniProcExecutor
def execute(name, size):
    parallel = types.SimpleNamespace(worker_extension_cls=name, data_parallel_size=size)
    UniProcExecutor(types.SimpleNamespace(parallel_config=parallel))
refused(lambda: execute("", 1), "--worker-extension-cls")
refused(lambda: execute("vllm_delta.worker.Rank", 1), "--worker-extension-cls")
refused(lambda: execute("vllm_delta.DeltaWorkerExtension", 2), "data parallelism")
import tempfile
from vllm.engine.arg_utils import AsyncEngineArgs
empty = tempfile.mkdtemp()
def start(name):
    AsyncEngineArgs(model=empty, worker_extension_cls=name).create_engine_config()
refused(lambda: start(""), "--worker-extension-cls")
try:
    # ours gets as far as the model
    start("vllm_delta.DeltaWorkerExtension")
except Exception as error:
    assert empty in str(error) and type(error).__name__ != "SetupError", error

# linear weights stay where the loader put them
from vllm.model_executor.layers import utils
layer = torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
before = layer.weight
utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
assert layer.weight is before and layer.cpu_linear is torch.nn.functional.linear

# routes
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints import serve
app = FastAPI()
app.state.args = types.SimpleNamespace(api_key=None)
serve.register_vllm_serve_api_routers(app)
asked = []
class Core:
    async def call_utility_async(self, method):
        asked.append(method)
        if method == "delta_verify" and asked.count(method) > 1:
            raise RuntimeError("engine is dead")
        return {"method": method}
app.state.engine_client = types.SimpleNamespace(engine_core=Core())
client = TestClient(app)
assert client.get("/delta/status").json() == {"method": "delta_status"}
assert client.post("/delta/verify").json() == {"method": "delta_verify"}
assert client.get("/delta/verify").status_code == 405
assert client.post("/delta/verify").status_code == 503
app.state.args.api_key = ["secret"]
assert client.post("/delta/verify").status_code == 401
assert client.post("/delta/verify", headers={"Authorization": "Bearer secret"}).status_code == 503
assert client.get("/delta/status").status_code == 200
app.state.engine_client = None
assert client.get("/delta/status").status_code == 503

# the cache policy `forget` on vLLM's own block pool
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.utils.hashing import sha256
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm_delta.cache import forget, renew
init_none_hash(sha256)
hasher = get_request_block_hasher(16, sha256)
def request(name):
    return Request(name, list(range(40)), SamplingParams(max_tokens=9), None, block_hasher=hasher)
pool = BlockPool(8, enable_caching=True, hash_block_size=16)
old, fresh = request("old"), request("fresh")
blocks = pool.get_new_blocks(2)
pool.cache_full_blocks(old, blocks[:1], 0, 1, 16, 0)
old.num_computed_tokens = 20
waiting = request("waiting")
hits = lambda r: [pool.get_cached_block(h, [0]) is not None for h in r.block_hashes]
assert hits(fresh) == [True, False]
# of a request that is over: its block is free and has a hash
done = pool.get_new_blocks(1)
pool.cache_full_blocks(fresh, done, 0, 1, 16, 0)
pool.free_blocks(done)
group = types.SimpleNamespace(block_pool=pool, req_to_blocks={"old": blocks})
manager = types.SimpleNamespace(coordinator=types.SimpleNamespace(block_pool=pool, single_type_managers=(group,)))
scheduler = types.SimpleNamespace(
    kv_cache_manager=manager, requests={"old": old, "waiting": waiting}, connector=None
)
core = types.SimpleNamespace(
    scheduler=scheduler,
    vllm_config=types.SimpleNamespace(model_config=types.SimpleNamespace(is_multimodal_model=False)),
)
renew(core, "keep", "v")
assert hits(fresh) == [True, False]
renew(core, "forget", "v")
assert hits(fresh) == [False, False] and pool.get_num_free_blocks() == 5
assert blocks[0].block_hash is None
# what the old request computes on is cached where only itself looks
pool.cache_full_blocks(old, blocks, 1, 2, 16, 0)
assert hits(fresh) == [False, False] and hits(old) == [False, True]
assert waiting.block_hashes == fresh.block_hashes and waiting.cache_salt is None
old.append_output_token_ids(list(range(8)))
fresh.append_output_token_ids(list(range(8)))
assert len(old.block_hashes) == 3 and not set(old.block_hashes) & set(fresh.block_hashes)
# what is cached anew stays found when the free block with the same hash is taken
again = pool.get_new_blocks(1)
assert again != done
pool.cache_full_blocks(fresh, again, 0, 1, 16, 0)
assert done[0] in pool.get_new_blocks(4) and done[0].block_hash is None
assert pool.get_cached_block(fresh.block_hashes[0], [0]) == again
# another label, another hash, and as many bytes; in the order of the versions
def lived(*labels):
    one = request("one")
    one.num_computed_tokens = 20
    scheduler.requests = {"one": one}
    for label in labels:
        forget(scheduler, label)
    assert [len(h) for h in one.block_hashes] == [len(h) for h in fresh.block_hashes[:2]]
    return one.cache_salt, *one.block_hashes
histories = [(), ("a",), ("b",), ("a", "a"), ("a", "b"), ("b", "a")]
found = [lived(*history) for history in histories]
assert lived("a", "b") == lived("a", "b")
assert all(len(set(column)) == len(histories) for column in zip(*found))
# a connector may look at the hashes of free blocks
pool.free_blocks(again)
assert again[0].block_hash is not None
scheduler.connector = object()
forget(scheduler, "v")
assert again[0].block_hash is None
print("all good")
"""


def run(code: str, tmp_path: Path, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DELTA_SYNC_", "VLLM_PLUGINS"))}
    # another folder than the repository's, where vLLM would find a folder called triton_kernels
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=clean | env, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_without_a_bucket_registration_does_nothing_and_the_extension_is_refused(tmp_path: Path):
    for env in ({}, {"DELTA_SYNC_BUCKET": " "}):
        out = run(WITHOUT_BUCKET, tmp_path, **env)
        assert out.startswith("SetupError DELTA_SYNC_BUCKET is not set")


def test_the_extension_without_the_plugin_is_refused(tmp_path: Path):
    out = run(WITHOUT_PLUGIN, tmp_path, DELTA_SYNC_BUCKET="/bucket", VLLM_PLUGINS="other")
    assert out.startswith("SetupError") and "VLLM_PLUGINS='other' must contain 'vllm_delta'" in out


def test_a_setting_that_cannot_work_ends_the_start(tmp_path: Path):
    out = run(BAD_SETTING, tmp_path, DELTA_SYNC_BUCKET="/bucket", DELTA_SYNC_POLL_S="often")
    assert out.startswith("SetupError DELTA_SYNC_POLL_S='often'")


def test_what_is_extended_with_a_bucket(tmp_path: Path):
    assert "all good" in run(WITH_BUCKET, tmp_path, DELTA_SYNC_BUCKET=str(tmp_path / "bucket"))
