# SPDX-License-Identifier: Apache-2.0
"""TRL's real GRPOTrainer in vLLM server mode, with a stub for the server: it answers, and acknowledges what it sees.

tests/integration/test_trainers.py does the same with a real server.
"""

import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from training import pointed_to
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from delta_wire.acks import Ack
from delta_wire.bucket import BucketReader
from delta_wire.digest import Digest
from delta_wire.errors import SetupError, StoreError
from delta_wire.manifest import Manifest
from delta_wire.stores import open_store
from trl_delta import DeltaSyncConfig, attach, server_mode
from trl_delta.detector import tensor_digests

STEPS = 3


class StubServer:
    """Generates random tokens, and notes the newest version in the bucket that it has acknowledged by then.

    Args:
        bucket (`Path`): followed.
        delay_s (`float`): between seeing a version and serving it.
    """

    def __init__(self, bucket: Path, delay_s: float = 0.1):
        self.bucket = bucket
        self.delay_s = delay_s
        self.served: Manifest | None = None
        # optimizer step of the weights that each request was answered with
        self.answered_with: list[int | None] = []
        self._stop = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def reply(self, body: dict, status: int = 200) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self):
                # as a server that is not in development mode
                known = {"/health": {}, "/v1/models": {"data": [{"id": "model"}]}}
                path = self.path.partition("?")[0]
                self.reply(known.get(path, {}), 200 if path in known else 404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.answered_with.append(stub.served.step if stub.served else None)
                self.reply({"choices": stub.choices(body)})

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._threads = [threading.Thread(target=self._http.serve_forever), threading.Thread(target=self._follow)]
        for thread in self._threads:
            thread.start()

    def choices(self, body: dict) -> list[dict]:
        choices = []
        for prompt in body["prompt"]:
            for _ in range(body["n"]):
                ids = [random.randrange(4, 500) for _ in range(body["max_tokens"])]
                logprobs = {
                    "tokens": [f"token_id:{token}" for token in ids],
                    "token_logprobs": [-6.0] * len(ids),
                    "top_logprobs": [None] * len(ids),
                }
                choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        return choices

    def _follow(self) -> None:
        while not self._stop.wait(0.02):
            try:
                reader = BucketReader(open_store(self.bucket))
                latest = reader.latest()
                if latest is None or latest == self.served:
                    continue
                time.sleep(self.delay_s)
                self.served = latest
                reader.write_ack(Ack("stub", latest.version, latest.digest, "serving", None, 1.0, time.time()))
            except StoreError:
                continue

    def stop_following(self) -> None:
        self._stop.set()
        self._threads[1].join()

    def close(self) -> None:
        self.stop_following()
        self._http.shutdown()
        for thread in self._threads:
            thread.join()
        self._http.server_close()


@pytest.fixture
def stub(tmp_path):
    server = StubServer(tmp_path / "bucket")
    yield server
    server.close()


def reward(completions, **kwargs):
    # unequal in every group of two, so that every step has a gradient
    return [float(number % 2) for number in range(len(completions))]


def make_trainer(folder: Path, tmp_path: Path, stub: StubServer, peft_config=None, **more) -> GRPOTrainer:
    from datasets import Dataset

    args = GRPOConfig(
        **{
            "output_dir": str(tmp_path / "trainer"),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 6,
            "learning_rate": 1e-4,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": stub.url,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        | more
    )
    prompts = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(8)]
    with server_mode():
        return GRPOTrainer(
            model=str(folder),
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=peft_config,
        )


FAST = {"delta_sync_ack_poll_s": 0.02}


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, [0, 1, 2]),
        ({"gradient_accumulation_steps": 2}, [0, 1, 2]),
        # one generation for two optimizer steps
        ({"steps_per_generation": 2, "max_steps": 4}, [0, 2]),
    ],
)
def test_every_generation_has_the_weights_of_its_step(tiny_model, tmp_path, stub, more, steps):
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub, **more)
    callback = attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST))
    trainer.train()
    assert stub.answered_with == steps
    # the weights of the last step, which TRL itself never sends
    latest = pointed_to(tmp_path / "bucket")
    assert latest.step == trainer.state.global_step
    assert latest.digest == sum(tensor_digests(callback.session.live()).values(), Digest())
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert all("delta/changed_frac" in line for line in lines)


def test_weights_between_two_cadences_are_published_for_a_generation(tiny_model, tmp_path, stub):
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_steps=10))
    trainer.train()
    assert stub.answered_with == [0, 1, 2]


def test_a_bound_above_zero_lets_generation_be_behind_but_no_further(tiny_model, tmp_path, stub):
    stub.delay_s = 0.5
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub, max_steps=5)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_max_lag_versions=1))
    trainer.train()
    assert len(stub.answered_with) == 5
    assert all(step - 1 <= (answered or 0) <= step for step, answered in enumerate(stub.answered_with))


def test_servers_that_do_not_follow_are_reported_and_do_not_stop_training(tiny_model, tmp_path, stub, caplog):
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub)
    callback = attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_lag_timeout_s=0.5))

    class Lose(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            # it has generated for the first step by now, and will not hear of another version
            stub.stop_following()

    trainer.add_callback(Lose())
    trainer.train()
    assert callback.session.watcher.seq == 0
    assert trainer.state.global_step == STEPS
    assert stub.answered_with == [0, 0, 0]
    said = [record for record in caplog.records if "delta_sync_lag_timeout_s" in record.getMessage()]
    assert len(said) == 1
    assert pointed_to(tmp_path / "bucket").step == STEPS


def test_no_server_that_follows_the_bucket_is_refused_with_what_to_start(tiny_model, tmp_path, stub):
    stub.stop_following()
    trainer = make_trainer(tiny_model("qwen3"), tmp_path, stub)
    attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST, delta_sync_start_timeout_s=0.3))
    with pytest.raises(SetupError, match=r"found none.*vllm_delta\.DeltaWorkerExtension"):
        trainer.train()


def test_an_adapter_never_moves_a_bf16_base(tiny_model, tmp_path, stub):
    from peft import LoraConfig

    trainer = make_trainer(
        tiny_model("qwen3"),
        tmp_path,
        stub,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
        model_init_kwargs={"dtype": "bfloat16"},
        learning_rate=1e-3,
    )
    callback = attach(trainer, str(tmp_path / "bucket"), DeltaSyncConfig(**FAST))
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert base
    for name, param in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(param, base[name]), name
    assert stub.answered_with == [0, 1, 2]
    assert pointed_to(tmp_path / "bucket").digest == sum(tensor_digests(callback.session.live()).values(), Digest())
