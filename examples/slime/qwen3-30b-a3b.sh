#!/bin/bash
# Qwen3-30B-A3B: trainers on two nodes of 8 GPUs (TP4 x PP2 x CP2, EP8), four engines of TP4 on two more.
# Not run by us: no such machines were at hand. What was run, on CPUs, is tests/upstream/slime_cpu/run.sh.
#
# Start Ray first, as slime's own scripts do:   ray start --head ...   and on the other node   ray start --address ...
# r3channel must be installed in the image of every node, because engines load it as a plug-in. In a clone of it:
#   pip wheel --no-deps -w dist . && pip install "$(echo dist/r3channel-*.whl)[direct,fast]"
set -euo pipefail
: "${SLIME:?the checkout of slime}" "${MEGATRON:?that of its Megatron}" "${MODEL:?the Hugging Face folder}"
: "${LOAD:?the same as Megatron checkpoint}" "${PROMPTS:?prompts in JSON lines}"
: "${TOKEN_FILE:?a path that every node can read; the file is made if it is missing}"
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
  # Engines send rows straight to the relay, and the reply names them in 40 bytes. On several nodes every process reads the run's
  # token out of this file. `inband`, the default, needs neither it nor an open port.
  --r3-delivery direct --r3-token-file "$TOKEN_FILE"
  # What the relay may hold is worked out from the arguments above where --r3-store-bytes is not given: 3.6 GB here, at 384 bytes
  # a token, for the step that is delivered and the one that is generated.
  #
  # What one trainer rank receives per step at most (`r3channel plan` says 221 MB for 256 samples of 9,000 tokens). Memory for
  # two such shards is made where its routers are when it joins; a larger step makes more.
  --r3-expected-shard-bytes 268435456
  # One step off: refuse a step whose rows are more than two weight updates old.
  --r3-max-staleness 2 --r3-on-stale reject
  # A page for Prometheus of the relay, each trainer and each engine, at a free port each: the relay's /targets lists them.
  --r3-metrics-port 0
)
# Look first, when it is slow: r3channel_stage_seconds of the trainers, {stage="wait_relay"} (the relay is not ready: generation
# ended late), then {stage="wait_wire"} (the network); `recv` is ahead of a step, and nobody waits. dashboards/ has the panels.
# Look first, when it is refused: the last line of the driver's log. `r3channel doctor --slime "$SLIME" -- ARGUMENTS` beforehand.

cd "$SLIME"
ray job submit --address "http://127.0.0.1:8265" \
  --runtime-env-json '{"env_vars": {"PYTHONPATH": "'"$MEGATRON"'", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \
  -- r3channel slime train_async.py "${MODEL_ARGS[@]}" "${PARALLEL[@]}" "${ROLLOUT[@]}" "${CHANNEL[@]}" \
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 \
  --advantage-estimator grpo --eps-clip 0.2 --use-tis \
  --attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --attention-backend flash
