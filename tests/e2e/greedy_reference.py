"""Greedy answers of a Hugging Face folder by transformers, float32, in a process of its own.

python greedy_reference.py FOLDER      reads one JSON line [[prompt, answer], ...], answers with a line of token lists
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(folder: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    import torch
    from transformers import Qwen3MoeForCausalLM

    model: Any = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt, answer in json.loads(sys.stdin.readline()):
        tokens = list(prompt)
        for _ in answer:
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    print(json.dumps(answers), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
