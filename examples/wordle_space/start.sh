#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Start of the container: say what is set up wrong before a GPU is kept waiting, then serve.
set -euo pipefail

: "${DELTA_SYNC_BUCKET:?set DELTA_SYNC_BUCKET to the bucket of the training run}"
: "${MODEL:?set MODEL to the checkpoint that the run started from}"

serve=(
    vllm serve "$MODEL" --host 0.0.0.0 --port "${PORT:-7860}" --dtype bfloat16
    --worker-extension-cls vllm_delta.DeltaWorkerExtension
    # the trainer compares log-probabilities of the distribution that was sampled from
    --logprobs-mode processed_logprobs
    "$@"
)
# a server may have no right to write, or below acks/ only
delta-wire doctor "$DELTA_SYNC_BUCKET" --read-only --serve "$(printf '%q ' "${serve[@]}")"
exec "${serve[@]}"
