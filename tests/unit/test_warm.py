# SPDX-License-Identifier: Apache-2.0
"""After a warm-up no version waits for a compiler."""

import subprocess
import sys
from pathlib import Path

# in a process of its own, in which nothing else has compiled anything
CODE = """
import pkgutil
from pathlib import Path

import numpy as np
from numba.core.dispatcher import Dispatcher

import delta_wire.kernels
from delta_wire import encodings
from delta_wire.encodings.warm import warm_up
from delta_wire.state import TensorDelta, TensorSpec, TensorTable, after, change_of_digest, compose, resolve


def compiled():
    names = [module.name for module in pkgutil.iter_modules(delta_wire.kernels.__path__)]
    modules = [__import__(f"delta_wire.kernels.{name}", fromlist=["_"]) for name in names if name.startswith("cpu")]
    functions = [value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)]
    return {(function.py_func.__qualname__, signature) for function in functions for signature in function.signatures}


delta_wire.kernels.warm_up()
warm_up()
before = compiled()
assert before
random = np.random.default_rng(1)
table = TensorTable([TensorSpec("a", (300, 400)), TensorSpec("b", (5,)), TensorSpec("c", (2000,))])
weights = {name: random.standard_normal(spec.num_elements).astype("f4") for name, spec in table.items()}
state = {name: (values.view("u4") >> 16).astype("u2") for name, values in weights.items()}
for most in (2, 60_000):
    delta = {}
    for (name, spec), count in zip(table.items(), (400, 5, 1100)):
        indices = np.sort(random.choice(spec.num_elements, count, replace=False)).astype("i4")
        old = state[name][indices]
        delta[name] = TensorDelta(name, indices, old ^ random.integers(1, most, count).astype("u2"), old)
    change_of_digest(delta)
    for name in ("plain", "packed", "context"):
        encoding = encodings.get(name)
        encoding.encode(delta, table, Path("file"), 1, state.__getitem__)
        found = encoding.decode(Path("file"), table, "file", state.__getitem__)
        compose(found, found)
        for n, part in found.items():
            assert (after(state[n], resolve(part, state[n][part.indices])) == after(state[n], delta[n])).all()
    compose(delta, delta)
print(sorted(compiled() - before))
"""


def test_coding_compiles_nothing_after_a_warm_up(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
