"""Tables of operators and the rules that fold K into them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.rules.attention import attention, multi_head_attention
from fusion.rules.cells import GRU, LSTM, RNN_RELU, RNN_TANH
from fusion.rules.conv import convolution, transposed
from fusion.rules.dropout import dropout
from fusion.rules.embedding import embedding
from fusion.rules.gradient import backward, gradient, requires_grad
from fusion.rules.linear import addmm, linear
from fusion.rules.loss import cross_entropy
from fusion.rules.member import Rule
from fusion.rules.norm import batch_norm, group_norm, normalize, weight_norm
from fusion.rules.pool import pooling
from fusion.rules.recurrent import pack, recurrent, recurrent_cell, scatter

RULES: dict[Any, Rule] = {
    F.linear: linear,
    torch.addmm: addmm,
    F.conv1d: convolution(F.conv1d, 1),
    F.conv2d: convolution(F.conv2d, 2),
    F.conv3d: convolution(F.conv3d, 3),
    F.conv_transpose1d: transposed(F.conv_transpose1d, 1),
    F.conv_transpose2d: transposed(F.conv_transpose2d, 2),
    F.conv_transpose3d: transposed(F.conv_transpose3d, 3),
    F.max_pool2d: pooling(F.max_pool2d),
    torch.max_pool2d: pooling(torch.max_pool2d),
    F.avg_pool2d: pooling(F.avg_pool2d),
    F.adaptive_avg_pool2d: pooling(F.adaptive_avg_pool2d),
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.embedding: embedding,
    F.cross_entropy: cross_entropy,
    torch.autograd.grad: gradient,
    Tensor.backward: backward,
    torch.lstm_cell: recurrent_cell(LSTM),
    torch.gru_cell: recurrent_cell(GRU),
    torch.rnn_tanh_cell: recurrent_cell(RNN_TANH),
    torch.rnn_relu_cell: recurrent_cell(RNN_RELU),
    torch._pack_padded_sequence: pack(torch._pack_padded_sequence),
    torch._pad_packed_sequence: pack(torch._pad_packed_sequence),
    Tensor.scatter_: scatter,
}

# The same for operators that draw the random numbers of K members: these rules also take `streams`.
DRAWING_RULES: dict[Any, Rule] = {
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    torch.lstm: recurrent(torch.lstm, LSTM),
    torch.gru: recurrent(torch.gru, GRU),
    torch.rnn_tanh: recurrent(torch.rnn_tanh, RNN_TANH),
    torch.rnn_relu: recurrent(torch.rnn_relu, RNN_RELU),
}

# After these, a tensor that members share stands for one of each: gradients by it differ.
REQUIRING: dict[Any, Rule] = {Tensor.requires_grad_: requires_grad, Tensor.requires_grad.__set__: requires_grad}  # type: ignore[attr-defined]

# These make empty tensors: a tensor that is later filled in place must have room for each member.
UNFILLED = {torch.empty, torch.empty_like, Tensor.new_empty}

# Written for one member, in operators that have rules themselves; they run inside `vmap` and call those.
COMPOSITES: dict[Any, Rule] = {
    F.multi_head_attention_forward: multi_head_attention,
    F.normalize: normalize,
    torch._weight_norm: weight_norm,
}
