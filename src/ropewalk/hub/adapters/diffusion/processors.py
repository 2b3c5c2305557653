"""Attention processors for diffusers, with norm and rotation of q and k in one pass.

`Fused` has the steps, in the order of `_run`; a class per processor has what differs. Each has the interface of the
processor that it replaces, and calls it for what it does not support: attention without a rotation, fused projections,
and models with image keys of their own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.hub.adapters.diffusion.fused import PairAngles, norm_rotated

__all__ = ["LTX", "AcrossHeads", "Flux", "Flux2", "Flux2Parallel", "Fused", "QwenImage", "Wan", "ZImage"]


class Fused:
    """What the processors share: the processor that is replaced, its attention backend, and the tables.

    A copy or a pickle is the plain processor.

    Args:
        plain: The processor of diffusers.
        tables: The tables of the model, which all of its processors share.
        dispatch: `dispatch_attention_fn` of diffusers.

    >>> Fused("plain", PairAngles()).plain
    'plain'
    """

    def __init__(self, plain: Any, tables: PairAngles, dispatch: Any = None) -> None:
        self.plain = plain
        self.tables = tables
        self.dispatch = dispatch

    # `set_attention_backend` and context parallelism of diffusers set these two on every processor.
    @property
    def _attention_backend(self) -> Any:
        return self.plain._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.plain._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.plain._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.plain._parallel_config = config

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self.plain,)

    def _run(self, attn: Any, x: Tensor, text: Tensor | None, mask: Tensor | None, table: Any) -> Any:
        """Attend, as the plain processor does: the steps that a model has in common with others."""
        if table is None or not self._supports(attn, text, mask):
            return self.plain(attn, x, text, mask, table)
        q, k, v = self._rotated(attn, x, text, table)
        return self._projected(attn, self._attend(q, k, v, mask), text)

    def _supports(self, attn: Any, text: Tensor | None, mask: Tensor | None) -> bool:
        """Whether a call with a table is run here, and not by the plain processor."""
        return True

    def _rotated(self, attn: Any, x: Tensor, text: Tensor | None, table: Any) -> Sequence[Tensor]:
        """Return queries, keys and values [batch, seq, heads, head_dim], of text and image if they are joint."""
        q, k, v = (p(x).unflatten(-1, self._heads(attn)) for p in (attn.to_q, attn.to_k, attn.to_v))
        return *norm_rotated(q, k, attn.norm_q, attn.norm_k, self.tables(table)), v

    def _heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of heads and their width, one of which is -1: with tensor parallelism heads are fewer."""
        return -1, attn.head_dim

    def _joint(self, attn: Any, x: Tensor, text: Tensor, x_angles: Any, text_angles: Any) -> list[Tensor]:
        """Return joint queries, keys and values of text and image, text first. Both are normalized and rotated apart.

        Angles are pairs of `Angles` and the row of the first token.
        """
        heads, added = self._heads(attn), (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        q, k, v = (projection(x).unflatten(-1, heads) for projection in (attn.to_q, attn.to_k, attn.to_v))
        text_q, text_k, text_v = (projection(text).unflatten(-1, heads) for projection in added)
        q, k = norm_rotated(q, k, attn.norm_q, attn.norm_k, *x_angles)
        text_q, text_k = norm_rotated(text_q, text_k, attn.norm_added_q, attn.norm_added_k, *text_angles)
        return [torch.cat(both, dim=1) for both in ((text_q, q), (text_k, k), (text_v, v))]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the result of attention [batch, seq, heads * head_dim] by the backend that diffusers chooses."""
        options = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        out = self.dispatch(q, k, v, attn_mask=mask, **options)
        return out.flatten(2, 3).to(q.dtype)

    def _projected(self, attn: Any, out: Tensor, text: Tensor | None) -> Any:
        """Return the output of the layer; for joint attention, those of image and text."""
        if text is None:
            return _through(attn.to_out, out)
        rows = text.shape[1]
        text_out, image_out = out[:, :rows].contiguous(), out[:, rows:].contiguous()
        return _through(attn.to_out, image_out), attn.to_add_out(text_out)


def _plain(plain: Any) -> Any:
    return plain


def _fused_projections(attn: Any) -> bool:
    return bool(getattr(attn, "fused_projections", False))


def _through(layers: Iterable[Any], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Flux(Fused):
    """Flux: blocks with text and image, and blocks with one stream.

    >>> Flux.__call__.__name__
    '__call__'
    """

    # Whether a block with one stream has an output projection.
    projects = False

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Attend, as the plain processor does."""
        return self._run(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    def _supports(self, attn: Any, text: Tensor | None, mask: Tensor | None) -> bool:
        return not _fused_projections(attn) and (attn.added_kv_proj_dim is not None) == (text is not None)

    def _rotated(self, attn: Any, x: Tensor, text: Tensor | None, table: Any) -> Sequence[Tensor]:
        if text is None:
            return super()._rotated(attn, x, text, table)
        angles = self.tables(table)
        return self._joint(attn, x, text, (angles, text.shape[1]), (angles, 0))

    def _projected(self, attn: Any, out: Tensor, text: Tensor | None) -> Any:
        return super()._projected(attn, out, text) if self.projects or text is not None else out


class Flux2(Flux):
    """Flux 2: blocks with text and image.

    >>> Flux2.projects
    True
    """

    projects = True


class Flux2Parallel(Fused):
    """Flux 2: blocks with one stream, whose projections contain the MLP.

    >>> Flux2Parallel.__call__.__name__
    '__call__'
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Attend, as the plain processor does."""
        if image_rotary_emb is None:
            return self.plain(attn, hidden_states, attention_mask, image_rotary_emb)
        projected = attn.to_qkv_mlp_proj(hidden_states)
        # Under tensor parallelism each rank has the same share of both parts.
        attention, mlp = 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
        width = projected.shape[-1] * attention // (attention + mlp)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected[..., :width].chunk(3, dim=-1))
        q, k = norm_rotated(q, k, attn.norm_q, attn.norm_k, self.tables(image_rotary_emb))
        out = self._attend(q, k, v, attention_mask)
        return attn.to_out(torch.cat([out, attn.mlp_act_fn(projected[..., width:])], dim=-1))


class QwenImage(Fused):
    """Qwen-Image: text and image with tables of their own, complex in diffusers.

    >>> QwenImage.__call__.__name__
    '__call__'
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Attend, as the plain processor does."""
        text = encoder_hidden_states
        if text is None or attention_mask is not None or image_rotary_emb is None:
            return self.plain(attn, hidden_states, text, encoder_hidden_states_mask, attention_mask, image_rotary_emb)
        mask = None
        if encoder_hidden_states_mask is not None:
            image = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
            mask = torch.cat([encoder_hidden_states_mask, image], dim=1)[:, None, None, :]
        return self._run(attn, hidden_states, text, mask, image_rotary_emb)

    def _rotated(self, attn: Any, x: Tensor, text: Any, table: Any) -> Sequence[Tensor]:
        image_angles, text_angles = (self.tables(part) for part in table)
        return self._joint(attn, x, text, (image_angles, 0), (text_angles, 0))

    def _heads(self, attn: Any) -> tuple[int, int]:
        return -1, attn.inner_dim // attn.heads


class ZImage(Fused):
    """Z-Image: one stream, and a complex table per sequence in diffusers.

    >>> ZImage.__call__.__name__
    '__call__'
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Any:
        """Attend, as the plain processor does. It ignores `encoder_hidden_states`."""
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        return self._run(attn, hidden_states, None, attention_mask, freqs_cis)

    def _heads(self, attn: Any) -> tuple[int, int]:
        return attn.heads, -1


class AcrossHeads(Fused):
    """Wan and LTX: the norm is over all heads, so they are one head of all features here.

    The tables of Wan are the same for each head, and are repeated. Those of LTX have different angles per head.

    >>> AcrossHeads.repeats
    True
    """

    # Whether the table has the angles of one head.
    repeats = True

    def _rotated(self, attn: Any, x: Tensor, text: Tensor | None, table: Any) -> Sequence[Tensor]:
        if _fused_projections(attn):
            q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        angles = self.tables(table, attn.heads if self.repeats else 1)
        q, k = norm_rotated(q.unsqueeze(-2), k.unsqueeze(-2), attn.norm_q, attn.norm_k, angles)
        return [y.reshape(*v.shape[:2], attn.heads, -1) for y in (q, k, v)]


class Wan(AcrossHeads):
    """Wan's self-attention.

    >>> Wan.repeats
    True
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Any:
        """Attend, as the plain processor does."""
        return self._run(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def _supports(self, attn: Any, text: Tensor | None, mask: Tensor | None) -> bool:
        return attn.add_k_proj is None and not attn.is_cross_attention and text is None


class LTX(AcrossHeads):
    """LTX's self-attention.

    >>> LTX.repeats
    False
    """

    repeats = False

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Attend, as the plain processor does."""
        return self._run(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    def _supports(self, attn: Any, text: Tensor | None, mask: Tensor | None) -> bool:
        return text is None and mask is None
