"""What is found in a tensor's bytes: digests, ours and SGLang's own, and whether each is a number."""

from __future__ import annotations

import hashlib

import torch
import xxhash

_ROW_BYTES = 16 << 10
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes in C order.

    They are a copy only if the tensor is not contiguous on the CPU.
    """
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def hashed_bytes(flat: torch.Tensor, *, summed: bool = False) -> memoryview:
    """Return the bytes of a staged tensor that are hashed.

    Args:
        flat: a contiguous tensor.
        summed: whether others have the tensor in a GPU's memory.

    Returns:
        The tensor's bytes; if it is in a GPU's memory, or `summed`, the bytes of its sums (`cross_sums`), which are few.
    """
    return host_bytes(cross_sums(flat) if summed or flat.is_cuda else flat)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the xxh3 of a tensor's bytes.

    The digest has 64 bits. Some 10 GB/s are hashed.
    """
    return xxhash.xxh3_64_hexdigest(host_bytes(tensor))


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the checksum that a CPU engine's `/weights_checker` reports.

    It is that of a parameter with these bytes: 16 hex digits of SHA-256.
    """
    return hashlib.sha256(host_bytes(tensor)).hexdigest()[:16]


def cross_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of a tensor that GPU and host find alike.

    A parameter thus need not come back from a GPU to be compared. The tensor's bytes are a matrix of words of 8 bytes, 2,048 in a
    row (zeros after the last). The sums are those of its columns, then of its rows: Huang and Abraham's checksums (1984). Only
    additions are made, and there is no temporary.

    A change of up to three words always shows. A change of more is missed only if it cancels out in every row and in every
    column, as at the corners of a rectangle: the sums stop accidents, not an attacker. A core of a host does 5.7 GB/s (AMD EPYC,
    torch 2.13; xxh3: 15).

    Args:
        tensor: a contiguous tensor.

    Returns:
        int64 sums modulo 2**64 on the tensor's device. The call does not wait for the device.
    """
    data_N = tensor.detach().view(-1).view(torch.uint8)
    if data_N.storage_offset() % 8:  # words must be aligned
        data_N = data_N.clone()
    end_N, whole = data_N.new_zeros(_ROW_BYTES), len(data_N) // _ROW_BYTES * _ROW_BYTES
    end_N[: len(data_N) - whole] = data_N[whole:]
    parts = [part.view(torch.int64).view(-1, _ROW_BYTES // 8) for part in (data_N[:whole], end_N)]
    return torch.cat([parts[0].sum(0) + parts[1].sum(0), parts[0].sum(1), parts[1].sum(1)])


def finite(values: torch.Tensor) -> bool:
    """Return whether no number is NaN or Inf.

    Integers are finite. On a GPU this waits for the device.

    >>> rows = torch.tensor([[1.0, float("inf")]] * 2)
    >>> finite(rows), finite(rows[:, ::2]), finite(rows[:0]), finite(rows[:, 0].long())
    (False, True, True, True)
    """
    if values.numel() == 0 or not values.is_floating_point():
        return True
    return _finite_on_host(values) if values.device.type == "cpu" else bool(_finite_on_device(values))


def _finite_on_device(values: torch.Tensor) -> torch.Tensor:
    """Compare minimum and maximum, which both keep NaN (tried on an H100)."""
    low, high = torch.aminmax(values.float() if values.itemsize == 1 else values)  # float8 has none
    return torch.isfinite(low) & torch.isfinite(high)


def _finite_on_host(values: torch.Tensor) -> bool:
    """Take two maxima over the bits, without a temporary.

    torch's isfinite is some 20 times slower for bfloat16 on a CPU. Read as signed integers the largest positive pattern wins,
    read as unsigned the largest negative one.
    """
    dtype, sign = values.dtype, 1 << (8 * values.itemsize - 1)
    # All patterns above that of the largest number are NaN or Inf: of OCP's e4m3 one, as it has no Inf.
    first = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(_SIGNED[dtype.itemsize])) + 1
    if not 0 < first < sign:  # float8 of AMD's, whose only NaN is minus zero; UE8M0, which has no sign
        return bool(torch.isfinite(values.detach().float()).all())
    signed = values.detach().view(_SIGNED[dtype.itemsize]).numpy()
    return int(signed.max()) < first and int(signed.view(f"u{dtype.itemsize}").max()) < first + sign
