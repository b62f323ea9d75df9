#!/bin/bash
# Qwen3-30B-A3B: trainers on two nodes of 8 GPUs (TP4 x PP2 x CP2, EP8), four engines of TP4 on two more.
# Not run by us: no such machines were at hand. What was run, on CPUs, is tests/upstream/slime_cpu/run.sh.
#
# Start Ray first, as slime's own scripts do:   ray start --head ...   and on the other node   ray start --address ...
# r3channel must be installed in the image of every node (engines load it as a plug-in):   pip install "r3channel[direct]"
set -euo pipefail
: "${SLIME:?the checkout of slime}" "${MEGATRON:?that of its Megatron}" "${MODEL:?the Hugging Face folder}"
: "${LOAD:?the same as Megatron checkpoint}" "${PROMPTS:?prompts in JSON lines}"
source "$SLIME/scripts/models/qwen3-30B-A3B.sh" # MODEL_ARGS

PARALLEL=(
  --actor-num-nodes 2 --actor-num-gpus-per-node 8
  --tensor-model-parallel-size 4 --sequence-parallel
  --pipeline-model-parallel-size 2
  --context-parallel-size 2
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
  --use-dynamic-batch-size --max-tokens-per-gpu 16384
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
ROLLOUT=(
  --hf-checkpoint "$MODEL" --load "$LOAD"
  --prompt-data "$PROMPTS" --input-key prompt --label-key label
  --apply-chat-template --rollout-shuffle --rm-type deepscaler
  --num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
  --rollout-max-response-len 8192 --rollout-temperature 1
  --rollout-num-gpus 16 --rollout-num-gpus-per-engine 4
)
CHANNEL=(
  --use-r3-channel
  # Engines send rows straight to the relay; the reply holds a receipt of 64 bytes. `inband` needs no open port.
  --r3-delivery direct
  # What the relay holds: rows of the step that is delivered and of the one that is generated. 384 bytes a token here:
  # 2 steps x 256 samples x 9,000 tokens x 384 B = 1.8 GB; `r3channel plan` says it for your shape.
  --r3-store-bytes 4294967296
  # What one trainer rank receives per step at most: its host memory is made when it joins. `r3channel plan` says it.
  --r3-expected-shard-bytes 268435456
  # One step off: refuse a step whose rows are more than two weight updates old.
  --r3-max-staleness 2 --r3-on-stale reject
  # Per-stage timers of relay and trainers for Prometheus, at a free port each (the log names it).
  --r3-metrics-port 0
)
# Look first, when it is slow: r3channel_stage_seconds{stage="recv"} of the trainers (the wait), then {stage="wait_relay"}
# (the relay is not ready: generation ended late), then {stage="wait_wire"} (the network). dashboards/ has the panels.
# Look first, when it is refused: the last line of the driver's log. `r3channel doctor --slime "$SLIME" -- ARGUMENTS` beforehand.

cd "$SLIME"
ray job submit --address "http://127.0.0.1:8265" \
  --runtime-env-json '{"env_vars": {"PYTHONPATH": "'"$MEGATRON"'", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \
  -- r3channel slime train_async.py "${MODEL_ARGS[@]}" "${PARALLEL[@]}" "${ROLLOUT[@]}" "${CHANNEL[@]}" \
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 \
  --advantage-estimator grpo --eps-clip 0.2 --use-tis \
  --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --attention-backend flash
