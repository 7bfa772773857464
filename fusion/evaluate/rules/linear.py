"""Matrix products: one wide GEMM if members share the input or the weight, else one batched GEMM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusion.evaluate.rules.member import Member


def linear(K: int, input: Member, weight: Member, bias: Member | None = None) -> Any:
    """Compute `F.linear` for K members, each with input [..., I], weight [O, I] and bias [O]."""
    if weight.value.dim() - (weight.dim is not None) != 2:
        return NotImplemented
    if weight.dim is None:
        return _shared_weight(K, input, weight, bias)
    weight_KOI = weight.lead(K)
    bias_KO = None if bias is None else bias.lead(K)
    if input.dim is None:
        flat_bias = None if bias_KO is None else bias_KO.reshape(-1)
        out = F.linear(input.value, weight_KOI.flatten(0, 1), flat_bias)
        return Member(out.unflatten(-1, (K, -1)), out.dim() - 1)
    x_K = input.lead(K)
    x_KNI = x_K.reshape(K, -1, x_K.shape[-1])
    return Member(_batched(x_KNI, weight_KOI.mT, bias_KO).view(*x_K.shape[:-1], weight_KOI.shape[1]), 0)


def addmm(K: int, input: Member, mat1: Member, mat2: Member, **scales: Any) -> Any:
    """Compute `torch.addmm` for K members' layers `bias [O] + x [N, I] @ weight [I, O]`, as in GPT-2's `Conv1D`."""
    if scales or input.value.dim() - (input.dim is not None) != 1:
        return NotImplemented
    transposed = Member(mat2.value.mT, mat2.dim) if mat2.dim in (None, 0) else None
    return NotImplemented if transposed is None else linear(K, mat1, transposed, input)


def _shared_weight(K: int, input: Member, weight: Member, bias: Member | None) -> Member:
    x_K = input.lead(K)
    if bias is None or bias.dim is None:
        return Member(F.linear(x_K, weight.value, None if bias is None else bias.value), 0)
    out_K = F.linear(x_K, weight.value)
    bias_KO = bias.lead(K)
    return Member(out_K + bias_KO.view(K, *[1] * (out_K.dim() - 2), -1), 0)


def _batched(x_KNI: torch.Tensor, weight_KIO: torch.Tensor, bias_KO: torch.Tensor | None) -> torch.Tensor:
    if bias_KO is None:
        return torch.bmm(x_KNI, weight_KIO)
    return torch.baddbmm(bias_KO.unsqueeze(1), x_KNI, weight_KIO)


def of_sparse(K: int, sparse: Member, dense: Member) -> Any:
    """Multiply a shared sparse matrix [M, N], such as an adjacency matrix, with each member's dense [N, C] or [N]."""
    if sparse.dim is not None or dense.dim is None or dense.value.dim() not in (2, 3):
        return NotImplemented
    x = dense.at(K, 1)
    out = torch.sparse.mm(sparse.value, x.flatten(1))
    return Member(out.unflatten(1, x.shape[1:]), 1)


def bilinear(input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Compute `F.bilinear` for one member under `vmap`, where torch's own function would loop over the members."""
    with torch.autocast(input1.device.type, enabled=False):  # autocast leaves `F.bilinear` in full precision
        out = torch.einsum("...i,oij,...j->...o", input1.to(weight.dtype), weight, input2.to(weight.dtype))
    return out if bias is None else out + bias
