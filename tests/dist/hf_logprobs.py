"""Worker: transformers loads a Hugging Face folder in a process of its own and compares its log-probs with those expected.

python hf_logprobs.py FOLDER      prints one JSON object
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(folder: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    expected = load_file(f"{folder}/expected.st")
    with torch.no_grad():
        found = model.eval()(expected["tokens"]).logits.float().log_softmax(-1)
    worst = float((found - expected["logprobs"]).abs().max())
    names = {
        key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    print(json.dumps({"worst": worst, **names}), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
