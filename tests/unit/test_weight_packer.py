"""The making of a bucket's bytes, where they are on a device: what the sending thread may rely on."""

from __future__ import annotations

import pytest
import torch

from r3channel.weights.manifest import Bucket, TensorMeta
from r3channel.weights.pack import Packer
from r3channel.weights.progress import Deadline, Run


class OnDevice(torch.Tensor):
    """Host memory that says it is on a CUDA device: what is asked of the device can then be counted."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_bucket_packed_on_a_device_is_whole_when_it_is_handed_over(
    monkeypatch: pytest.MonkeyPatch, look: bool, dtype: torch.dtype
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
    packer = Packer(torch.device("cpu"), look=look)
    monkeypatch.setattr(packer, "_room", lambda *_: out_N)
    packer.pack(0, bucket, [tensor], Run(Deadline(20, "test")))
    assert [held.view(dtype).tolist() for held in waited] == [tensor.tolist()]
