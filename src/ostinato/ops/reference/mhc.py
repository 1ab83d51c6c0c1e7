"""References of `mhc_weights` and `mix_streams`: hyper-connections whose mix of streams is doubly stochastic.

They are the manifold-constrained hyper-connections of Xie et al. 2025 (arXiv 2512.24880), in the form of GLM-5.3. The n
streams of a token are side by side, [tokens, n * hidden].
"""

from __future__ import annotations

import torch


def mhc_weights(
    x: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    streams: int,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> torch.Tensor:
    """Return the weights with which a part of a layer reads the streams, and those with which it writes them.

    With z = fn x / rms(x), of n + n + n * n rows, `base` of as many and `scale` [3], all in float32:

        pre = sigmoid(scale_0 z + base) + eps,  post = 2 sigmoid(scale_1 z + base),  C = softmax(scale_2 z + base) + eps

    The rows of C, one for each stream that is read, have the softmax. Then Sinkhorn's algorithm divides C by the sums
    of its columns plus `eps`, and `iterations` - 1 times by those of its rows and of its columns.

    `x` [tokens, n * hidden], `fn` [(n + 2) * n, n * hidden] -> [tokens, n + n * (n + 1)] float32: pre, then for each
    stream that is written its column of C and its entry of post.
    """
    n = streams
    wide = x.float()
    mixed = (wide @ fn.float().T) * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm_eps)
    pre, post, comb = mixed.split((n, n, n * n), dim=-1)
    of_pre, of_post, of_comb = base.split((n, n, n * n))
    pre = torch.sigmoid(pre * scale[0] + of_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + of_post)
    comb = (comb * scale[2] + of_comb).unflatten(1, (n, n)).softmax(dim=-1) + eps
    comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=2, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    written = torch.cat((comb.transpose(1, 2), post.unsqueeze(2)), dim=2)
    return torch.cat((pre, written.flatten(1)), dim=1)


def mix_streams(x: torch.Tensor, y: torch.Tensor | None, weights: torch.Tensor, streams: int) -> torch.Tensor:
    """Return weighted sums of the streams of `x` [tokens, streams * hidden], and of `y` [tokens, hidden] if given.

    `weights` [tokens, m * n] float32 has n weights for each of the m results, those of the streams and then that of
    `y`; it may have one row for all tokens. -> [tokens, m * hidden] in the dtype of `x`, each sum rounded once.
    """
    parts = x.unflatten(1, (streams, -1))
    if y is not None:
        parts = torch.cat((parts, y.unsqueeze(1)), dim=1)
    by_result = weights.unflatten(1, (-1, parts.shape[1])).expand(len(x), -1, -1)
    mixed: torch.Tensor = by_result @ parts.float()
    return mixed.flatten(1).to(x.dtype)
