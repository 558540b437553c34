# SPDX-License-Identifier: Apache-2.0
"""The line that says how far a command is."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from delta_wire.commands.common import PATIENCE_S, Progress


def test_progress_is_shown_after_a_while(monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    shown = Progress("reading")
    shown.step(4)
    shown.show()
    assert capsys.readouterr().err == ""
    now_s[0] += PATIENCE_S
    shown.step(4)
    shown.show()
    assert capsys.readouterr().err == "\rreading [############            ] 2/4, 2 s left"
    shown.clear()
    assert capsys.readouterr().err.strip("\r ") == ""
    unknown = Progress("writing")
    now_s[0] += 70
    unknown.show()
    assert capsys.readouterr().err == "\rwriting … 70 s"


SLOW = """
import sys, threading
import delta_wire.commands.common as common
import delta_wire.replay as replay
from delta_wire.cli import main

common.PATIENCE_S, common._SHOW_S = 0.0, 0.05
shown = threading.Event()
show, checkout = common.Progress.show, replay.checkout
common.Progress.show = lambda self: (show(self), shown.set())
# takes until somebody has been told
replay.checkout = lambda *arguments: (sys.stderr.isatty() and shown.wait(60), checkout(*arguments))[1]
main()
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_terminals_and_goes_away(bucket, tmp_path, terminal):
    """Behind a real terminal, and behind a pipe."""
    end, other = os.openpty() if terminal else os.pipe()
    words = [sys.executable, "-c", SLOW, "checkout", f"{bucket}@latest", str(tmp_path / "out")]
    process = subprocess.Popen(words, cwd="/", stdout=subprocess.PIPE, stderr=other, text=True)
    os.close(other)
    said = b""
    # a terminal whose last writer has gone is an error to read
    with contextlib.suppress(OSError):
        while piece := os.read(end, 4096):
            said += piece
    os.close(end)
    out, _ = process.communicate(timeout=120)
    err = said.decode().replace("\r\n", "\n")
    assert process.returncode == 0 and out == f"{tmp_path / 'out'}\n"
    assert ("rebuilding version" in err) is terminal
    assert err.rpartition("\r")[2].startswith("version ") and err.endswith("proven\n")
