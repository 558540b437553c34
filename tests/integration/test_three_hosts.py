# SPDX-License-Identifier: Apache-2.0
"""Trainer, bucket and server on three hosts; the ends reach the bucket and not each other."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from three_hosts import BUCKET_ADDRESS, NotAvailable, ThreeHosts
from vllm_server import FLAGS

pytestmark = pytest.mark.e2e

SUPPORT = Path(__file__).parents[1] / "support"
BUCKET = "hf://buckets/team/weights/runs/1"
PORT = 8000
TIMEOUT_S = 300.0
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))"
CALL = """if True:
    import sys, urllib.request
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}{sys.argv[3]}", method=sys.argv[2])
    print(urllib.request.urlopen(request, timeout=100).read().decode())"""


@pytest.fixture
def hosts():
    try:
        with ThreeHosts() as hosts:
            yield hosts
    except NotAvailable as error:
        pytest.skip(str(error))


def call(hosts: ThreeHosts, method: str, path: str) -> dict | None:
    """What the server answers on its own host, `None` if it does not."""
    result = hosts.run("server", sys.executable, "-c", CALL, str(PORT), method, path)
    return json.loads(result.stdout) if result.returncode == 0 else None


def test_weights_reach_the_server_through_the_bucket_only(hosts, tiny_model, tmp_path):
    # both sides have the base checkpoint, as they would from a model hub
    model = tiny_model("qwen3")
    processes = []

    def start(host: str, *command: str, env: dict[str, str], **how) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            hosts.command(host, *command), env=env, cwd=tmp_path, text=True, start_new_session=True, **how
        )
        processes.append(process)
        return process

    try:
        hub = start(
            "bucket", sys.executable, str(SUPPORT / "hub_server.py"), BUCKET_ADDRESS, env=dict(os.environ), stdout=-1
        )
        assert hub.stdout is not None
        clients = dict(hub.stdout.readline().strip().split("=", 1) for _ in range(3))
        env = {**os.environ, **clients, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1"}
        log = tmp_path / "server.log"
        with log.open("w") as out:
            server = start(
                "server",
                str(Path(sys.executable).with_name("vllm")),
                *("serve", str(model), "--host=0.0.0.0", f"--port={PORT}", *FLAGS),
                "--worker-extension-cls=vllm_delta.DeltaWorkerExtension",
                env=env | {"DELTA_SYNC_BUCKET": BUCKET, "DELTA_SYNC_POLL_S": "0.2", "VLLM_NO_USAGE_STATS": "1"},
                stdout=out,
                stderr=out,
            )
        trained = hosts.run(
            "trainer", sys.executable, str(SUPPORT / "train_tiny.py"), str(model), BUCKET, "3",
            env=env, cwd=tmp_path, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert trained.returncode == 0, trained.stderr
        newest = json.loads(trained.stdout.splitlines()[-1])
        assert newest["seq"] >= 1

        deadline_s = time.monotonic() + TIMEOUT_S
        status = None
        while status is None or status.get("seq") != newest["seq"]:
            assert server.poll() is None and time.monotonic() < deadline_s, f"{status}\n{log.read_text()[-5000:]}"
            time.sleep(0.5)
            status = call(hosts, "GET", "/delta/status")
        verified = call(hosts, "POST", "/delta/verify")
        assert verified is not None and verified["digest"] == newest["digest"] == status["digest"]

        # the server listens, and the bucket's host reaches it; the trainer's host does not
        reached = hosts.run("bucket", sys.executable, "-c", CONNECT, hosts.address("server"), str(PORT), "30")
        refused = hosts.run("trainer", sys.executable, "-c", CONNECT, hosts.address("server"), str(PORT), "3")
        assert reached.returncode == 0 and refused.returncode != 0, refused.stderr
        assert hosts.forwarded() == 0, "packets passed between trainer and server"
        # and the weights went where they should
        assert hosts.sent_bytes("trainer") >= newest["delta_bytes"]
        assert hosts.received_bytes("server") >= newest["delta_bytes"]
    finally:
        for process in processes:
            # what was started inside a namespace goes with its group
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
