"""The making of a bucket's bytes, where they are on a device: what the sending thread may rely on."""

from __future__ import annotations

import pytest
import torch

from r3channel.weights.manifest import Bucket, TensorMeta
from r3channel.weights.pack import OnNonfinite, Packer
from r3channel.weights.progress import Deadline, Run
from r3channel.weights.store import Buffers


class OnDevice(torch.Tensor):
    """Host memory that says it is on a CUDA device: what is asked of the device can then be counted."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


@pytest.mark.parametrize("on_nonfinite", ["error", "allow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_bucket_packed_on_a_device_is_whole_when_it_is_handed_over(
    monkeypatch: pytest.MonkeyPatch, on_nonfinite: OnNonfinite, dtype: torch.dtype
) -> None:
    """The group sends from a thread of its own, whose current stream is not the one on which the trainer packs."""
    waited: list[torch.Tensor] = []
    out_N = torch.zeros(16, dtype=torch.uint8).as_subclass(OnDevice)

    class Stream:
        def synchronize(self) -> None:
            waited.append(out_N.as_subclass(torch.Tensor).clone())

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    tensor = torch.arange(4).to(dtype)
    bucket = Bucket.of([TensorMeta.of("w", tensor)])
    buffers = Buffers(keep=False)
    monkeypatch.setattr(buffers, "take", lambda *_: out_N)
    Packer(buffers, on_nonfinite).pack(0, bucket, [tensor], Run(Deadline(20, "test")))
    assert [held.view(dtype).tolist() for held in waited] == [tensor.tolist()]
