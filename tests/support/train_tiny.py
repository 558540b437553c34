# SPDX-License-Identifier: Apache-2.0
"""A few real training steps of TRL's SFTTrainer on a CPU, published into a bucket: train_tiny.py MODEL BUCKET STEPS.

Prints one line of JSON: the newest version in the bucket, its digest, the bytes of all deltas.
"""

import json
import sys
import tempfile

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from trl_delta import DeltaSyncCallback


def main(model: str, bucket: str, steps: int) -> None:
    rows = [{"text": f"What is {a} plus {b}? The answer is {a + b}."} for a in range(8) for b in range(8)]
    callback = DeltaSyncCallback(bucket)
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-4,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), callbacks=[callback]).train()
    publisher = callback.session.publisher
    assert publisher is not None and publisher.wait(60), "the bucket did not take the last version"
    result = {
        "seq": publisher.durable_seq,
        "digest": str(publisher.digest_of(publisher.durable_seq)),
        "delta_bytes": sum(record.delta_bytes for record in publisher.records),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
