#!/bin/bash
# slime's own train_async.py with the channel, on a machine without a GPU; no file of slime, Megatron or SGLang is edited.
#   R3TEST_UPSTREAM=FOLDER tests/upstream/slime_cpu/run.sh [--tp 2] [--dp 2] [--cp 2] [--pp 2] [--engines 2] [--stock] [-- slime's arguments]
# FOLDER holds slime-624b824a and megatron-lm-1dcf0daf, each a checkout or a .tar.gz. Prints one JSON object.
set -euo pipefail
cd "$(dirname "$0")/../../.."
: "${R3TEST_UPSTREAM:?a folder with slime-624b824a and megatron-lm-1dcf0daf (checkouts or .tar.gz)}"
make -s setup
WORK="${WORK:-$(mktemp -d)}"
exec .venv/bin/python -m tests.upstream.slime_cpu.run --work "$WORK" "$@"
