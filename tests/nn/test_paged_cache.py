"""A cache of one's own: 40 lines with pages, which Attention uses as it uses KVCache."""

import pytest
import torch

import ropewalk as rw
from nn.test_attention import DIM, WIDTH, layer
from strategies import vector


class PagedCache:
    """Keys and values in pages of a shared pool. A sequence takes a page when it needs one."""

    def __init__(self, batch, heads, width, *, pages=64, size=4, dtype=torch.float64):
        self.keys, self.values = (torch.zeros(pages, heads, size, width, dtype=dtype) for _ in range(2))
        self.places = torch.zeros(pages, size, dtype=torch.int64)
        self.size, self.free, self.tables = size, list(range(pages))[::-1], [[] for _ in range(batch)]
        self.lengths = torch.zeros(batch, dtype=torch.int64)

    def update(self, k, v, *, counts=None, positions=None, key_mask=None, window=None):
        assert key_mask is None, "this cache hides no tokens"
        starts, seq = self.lengths.clone(), k.shape[2]
        for row, table in enumerate(self.tables):
            begin, count = int(starts[row]), seq if counts is None else int(counts[row])
            ids = torch.arange(begin, begin + count)
            while len(table) * self.size < begin + count:
                table.append(self.free.pop())
            page, slot = torch.tensor(table)[ids // self.size], ids % self.size
            self.keys[page, :, slot] = k[row, :, :count].transpose(0, 1)
            self.values[page, :, slot] = v[row, :, :count].transpose(0, 1)
            given = ids if positions is None else positions.expand(len(k), -1)[row, :count]
            self.places[page, slot] = given
            self.lengths[row] += count
        pages = max(1, *map(len, self.tables))
        index = torch.tensor([table + [0] * (pages - len(table)) for table in self.tables])
        gathered = (pool[index].transpose(1, 2).flatten(2, 3) for pool in (self.keys, self.values))
        visibility = rw.Visibility(causal=True, starts=starts, window=window)
        return rw.CachedTokens(*gathered, self.places[index].flatten(1), visibility)


@pytest.mark.parametrize("kind", ["none", "rope", "alibi", "t5", "xpos"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_paged_cache_decodes_as_the_ordinary_one(kind, window):
    attention, x = layer(kind, window=window), vector(0, 3, 20, DIM)
    paged, ordinary = PagedCache(3, 2, WIDTH), rw.KVCache(3, 2, 40, WIDTH, dtype=torch.float64)
    assert isinstance(paged, rw.Cache)
    whole = attention(x).detach()
    counts = torch.tensor([7, 3, 5])
    with torch.inference_mode():
        for call in ({"counts": counts}, {}, {}, {}):
            ids = ordinary.lengths[:, None] + torch.arange(7 if "counts" in call else 1)
            tokens = x.gather(1, ids.clamp_max(19)[..., None].expand(-1, -1, DIM))
            before = ordinary.lengths.clone()
            y, z = (attention(tokens, cache=cache, **call) for cache in (paged, ordinary))
            for row in range(3):
                real = slice(0, int(ordinary.lengths[row] - before[row]))
                torch.testing.assert_close(y[row, real], z[row, real], rtol=0, atol=1e-12)
                seen = slice(int(before[row]), int(ordinary.lengths[row]))
                torch.testing.assert_close(y[row, real], whole[row, seen], rtol=0, atol=1e-12)
    assert torch.equal(paged.lengths, ordinary.lengths)


def test_what_is_no_cache():
    attention, x = layer("rope"), vector(0, 1, 3, DIM)
    for wrong in ({}, 7, torch.zeros(3), object()):
        with pytest.raises(rw.RopewalkError, match="a KVCache or another Cache, with lengths and update"):
            attention(x, cache=wrong)


def test_what_a_cache_must_return():
    attention, x = layer("rope"), vector(0, 1, 3, DIM)
    k = torch.zeros(1, 2, 3, WIDTH, dtype=torch.float64)
    ids, sees = torch.arange(3)[None], rw.Visibility(causal=True)
    for result, message in (
        ((k, k), "rw.CachedTokens"),
        (rw.CachedTokens(k, k, ids, None), "rw.Visibility"),
        (rw.CachedTokens(k, k[:, :, :2], ids, sees), r"values \[1, 2, 3, 6\]"),
        (rw.CachedTokens(k.float(), k, ids, sees), r"keys \[1, 2, 3, 6\] of torch.float64"),
        (rw.CachedTokens(k.transpose(1, 2), k, ids, sees), "keys"),
        (rw.CachedTokens(k, k, ids[:, :2], sees), r"positions \[1, 3\]"),
        (rw.CachedTokens(k, k, None, sees), "positions"),
    ):
        cache = PagedCache(1, 2, WIDTH)
        vars(cache)["update"] = lambda *given, result=result, **options: result
        with torch.no_grad(), pytest.raises(rw.RopewalkError, match=message):
            attention(x, cache=cache)
    with pytest.raises(rw.RopewalkError, match="pass it by name"):
        attention(x, PagedCache(1, 2, WIDTH))
