"""Matrix-Game-2's contract: that of Self-Forcing with a window, and beside it small caches of
the mouse and the keyboard, dicts of the same kind."""

import torch

from . import common, self_forcing
from .common import rope


def attention(q, k, v, q_lens=None, k_lens=None, softmax_scale=None, causal=False):
    return common.dense(q, k, v, softmax_scale)


class CausalWanModel(self_forcing.CausalWanModel):
    def forward(self, *args, **kwargs):
        mice = [{"k": torch.zeros(1, 6, 2, 8), "v": torch.zeros(1, 6, 2, 8)} for _ in self.blocks]
        return self._forward_inference(*args, kv_cache_mouse=mice, kv_cache_keyboard=mice, **kwargs)

    def _forward_inference(
        self,
        x,
        t,
        kv_cache=None,
        kv_cache_mouse=None,
        kv_cache_keyboard=None,
        crossattn_cache=None,
        current_start=0,
    ):
        shape, x = x.shape, x.flatten(2).transpose(1, 2) * (1 - t)
        for block, cache, mouse in zip(self.blocks, kv_cache, kv_cache_mouse, strict=True):
            layer = block.self_attn
            q, k, v = layer.qkv(x)
            end, filled = current_start + x.shape[1], cache["local_end_index"].item()
            new = end - cache["global_end_index"].item()
            gone = max(0, new + filled - cache["k"].shape[1])
            if gone:
                for rows in (cache["k"], cache["v"]):
                    rows[:, : filled - gone] = rows[:, gone:filled].clone()
            last = filled + new - gone
            cache["k"][:, last - x.shape[1] : last] = rope(k, current_start)
            cache["v"][:, last - x.shape[1] : last] = v
            out = attention(rope(q, current_start), cache["k"][:, :last], cache["v"][:, :last])
            mouse["k"][:, 2:4] = out.mean()
            seen = attention(torch.ones(1, 1, 2, 8), mouse["k"][:, :4].float(), mouse["v"][:, :4])
            x = x + layer.o(out.flatten(2)) + seen.mean().to(x.dtype)
            cache["global_end_index"].fill_(end)
            cache["local_end_index"].fill_(last)
        return x.transpose(1, 2).reshape(shape)


common.pose_as(__name__, "fake_matrix_game.wan.modules.causal_model", CausalWanModel)
ROWS, SINK = 24, 0
