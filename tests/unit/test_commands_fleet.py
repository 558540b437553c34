# SPDX-License-Identifier: Apache-2.0
"""What `delta-wire watch` says about servers, by their acknowledgements and by themselves."""

import http.server
import json
import subprocess
import threading

import pytest

from delta_wire.manifest import Ack


def test_watch_reads_acknowledgements(command, bucket, run):
    result = command("watch", bucket, "--once")
    assert result.code == 1 and "no server has said anything yet" in result.err
    reader = run.reader()
    created_unix_s = reader.latest().created_unix_s
    reader.write_ack(Ack("a", run.writer.version, run.writer.digest, "serving", None, 2.5, created_unix_s + 1))
    assert command("watch", bucket, "--once").code == 0
    old = reader.manifest(1)
    reader.write_ack(Ack("b", old.version, old.digest, "serving", None, 2.5, old.created_unix_s + 0.5))
    result = command("watch", bucket, "--once", "--json")
    assert result.code == 1, "b is two versions behind"
    first, second = result.json["servers"]
    assert (first["lag_versions"], first["latency_s"], first["pause_ms"]) == (0, 1.0, 2.5)
    assert (second["lag_versions"], second["latency_s"], second["seq"]) == (2, 0.5, 1)
    assert command("watch", bucket, "--once", "--max-lag", 2).code == 0
    reader.write_ack(Ack("a", run.writer.version, run.writer.digest, "degraded", "disk full", 2.5, created_unix_s))
    result = command("watch", bucket, "--once", "--max-lag", 2)
    assert result.code == 1 and "a: disk full" in result.err
    assert command("watch", bucket, "http://127.0.0.1:9").code == 2


@pytest.fixture
def server():
    """Something that answers as a server of vLLM does, with and without the extension."""
    status = {"state": "serving", "server": "one", "version": "r-1-3", "seq": 3, "lag_versions": 0, "pauses_ms": [4.0]}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.path == "/delta/status"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(json.dumps(status).encode() if known else b"{}")

        def log_message(self, *arguments):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", status
    httpd.shutdown()
    httpd.server_close()


def test_watch_asks_servers(command, server):
    url, status = server
    result = command("watch", url, "--once", "--json")
    assert result.code == 0
    assert result.json["servers"][0] | {"server": "one", "seq": 3, "pause_ms": 4.0} == result.json["servers"][0]
    result = command("watch", url, f"{url}/other", "http://127.0.0.1:9", "--once")
    assert result.code == 1 and result.out.count("unreachable") == 2
    assert "--worker-extension-cls vllm_delta.DeltaWorkerExtension" in result.err
    status["state"] = 7
    assert "unreachable" not in command("watch", url, "--once").out


def test_watch_goes_on(delta_wire_process, bucket, run):
    process = delta_wire_process("watch", bucket, "--json", "--interval", 0.1, stdout=subprocess.PIPE)
    try:
        assert json.loads(process.stdout.readline())["servers"] == []
        run.reader().write_ack(Ack("a", run.writer.version, run.writer.digest, "serving", None, 2.5, 1.0))
        assert json.loads(process.stdout.readline())["servers"][0]["server"] == "a"
    finally:
        process.kill()
        process.communicate()
