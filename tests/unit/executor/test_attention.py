"""The backends against attention written plainly; the exact one against itself, bit for bit."""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from common.errors import ConfigError
from executor_svc.attention.exact import TILE, tiled_softmax
from executor_svc.attention.layout import (
    AttentionBackend,
    AttentionShape,
    DecodePart,
    PrefillColumns,
    PrefillPart,
    RowTables,
    StepLayout,
)
from executor_svc.attention.registry import make_backend
from executor_svc.attention.varlen import VarlenAttention, why_no_varlen
from executor_svc.build import make_ops
from executor_svc.kv_cache import KvCache, KvShape
from executor_svc.numerics import ExactOps
from tests.contract.executors import interpreted
from tests.contract.kinds import CAN_INTERPRET
from tests.varlen_reference import varlen_reference

DIM = 16
_ROWS = 8
KV = KvShape(1, 2, DIM, 256, torch.bfloat16)
SHAPES = {"grouped": (6, 2), "alone": (4, 4), "one": (3, 1)}


class Sequence:
    """Random queries, keys and values of one sequence in one layer."""

    def __init__(self, length: int, heads: int, kv_heads: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, heads, DIM, generator=generator)
        self.k = torch.randn(length, kv_heads, DIM, generator=generator)
        self.v = torch.randn(length, kv_heads, DIM, generator=generator)
        self.length = length

    def plain(self, window: int) -> torch.Tensor:
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (t.repeat_interleave(group, 1).double() for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * DIM**-0.5
        visible = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        if window:
            visible &= ~visible.tril(-window)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


class Scene:
    """A backend over a cache whose blocks are handed out in no order; stale slots hold large numbers."""

    def __init__(self, name: str, heads: int, kv_heads: int, *, window: int = 0, block_size: int = 8) -> None:
        ops = make_ops("exact" if name == "exact" else "fast")
        if name == "triton":
            interpreted(ops)
        if isinstance(ops, ExactOps):
            ops.settle({(8, DIM)}, torch.device("cpu"))
        shape = KvShape(1, kv_heads, DIM, block_size, torch.float32)
        attention_shape = AttentionShape(heads, kv_heads, DIM, (window,))
        self.backend: AttentionBackend
        if name.startswith("varlen"):
            self.backend = VarlenAttention(attention_shape, varlen_reference, with_key_offsets=window == 0)
        else:
            self.backend = make_backend(name, attention_shape, shape, ops, torch.device("cpu"))
        self.cache = KvCache(shape, 128, lambda size, dtype: torch.full(size, 100.0, dtype=dtype))
        self.cache.data[:, :, self.cache.null_block] = 0
        order = torch.randperm(128, generator=torch.Generator().manual_seed(block_size)).tolist()
        self._free: list[int] = order
        self._tables: dict[int, list[int]] = {}
        self.size = block_size

    def step(self, work: list[tuple[int, Sequence, int, int]]) -> list[torch.Tensor]:
        """work: (row, sequence, start, count) in one step; rows with count 1 and start > 0 decode."""
        slots: list[int] = []
        prefills, columns, decode_tokens, decode_rows = [], [], [], []
        lengths = torch.ones(_ROWS, dtype=torch.int64)
        first = 0
        for at, (row, _, start, count) in enumerate(work):
            table = self._tables.setdefault(row, [])
            while len(table) * self.size < start + count:
                table.append(self._free.pop())
            slots += [table[p // self.size] * self.size + p % self.size for p in range(start, start + count)]
            lengths[row] = start + count
            if count == 1 and start:
                decode_tokens.append(first)
                decode_rows.append(row)
            else:
                prefills.append(PrefillPart(first, count, start, torch.tensor([row])))
                columns.append([at, first, count, start])
            first += count
        tables = torch.full((_ROWS, max(map(len, self._tables.values()))), self.cache.null_block, dtype=torch.int32)
        for row, table in self._tables.items():
            tables[row, : len(table)] = torch.tensor(table)
        decode = None
        if decode_rows:
            index = torch.tensor(decode_tokens) if prefills else None
            decode = DecodePart(index, torch.tensor(decode_rows), int(lengths[decode_rows].max()))
        layout = StepLayout(
            torch.tensor(slots),
            RowTables(tables, lengths, self.size),
            decode,
            tuple(prefills),
            _columns([row for row, *_ in work], columns),
        )
        parts = [(s.q[a : a + n], s.k[a : a + n], s.v[a : a + n]) for _, s, a, n in work]
        q, k, v = (torch.cat(columns) for columns in zip(*parts, strict=True))
        with torch.inference_mode():
            out = self.backend.begin(self.cache, layout)(0, q, k, v)
        return list(torch.split(out, [count for _, _, _, count in work]))


def _columns(rows: list[int], columns: list[list[int]]) -> PrefillColumns | None:
    return PrefillColumns(torch.tensor(rows), torch.tensor(columns).t().contiguous()) if columns else None


# The kernels' own tests go through the rest; the interpreter takes its time.
INTERPRETED = [("triton", "grouped", 70), ("triton", "one", 0)] if CAN_INTERPRET else []


PLAIN = product(("torch", "exact", "varlen stand-in"), SHAPES, (0, 5, 70))


@pytest.mark.parametrize(("name", "heads", "window"), [*PLAIN, *INTERPRETED])
def test_mixed_steps_give_what_plain_attention_gives(name: str, heads: str, window: int) -> None:
    scene = Scene(name, *SHAPES[heads], window=window)
    long, short = Sequence(150, *SHAPES[heads], seed=1), Sequence(20, *SHAPES[heads], seed=2)
    got_long = [*scene.step([(0, long, 0, 90)])]
    first_short, *_ = scene.step([(4, short, 0, 18), (7, long, 0, 1)])
    mixed = scene.step([(0, long, 90, 59), (4, short, 18, 1)])
    last = scene.step([(0, long, 149, 1), (4, short, 19, 1)])
    want_long, want_short = long.plain(window).float(), short.plain(window).float()
    assert torch.allclose(torch.cat([*got_long, mixed[0], last[0]]), want_long, atol=1e-5)
    assert torch.allclose(torch.cat([first_short, mixed[1], last[1]]), want_short, atol=1e-5)


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("window", [0, 70])
def test_exact_bits_do_not_depend_on_chunks_blocks_or_company(heads: str, window: int) -> None:
    sequence = Sequence(150, *SHAPES[heads], seed=3)
    other = [Sequence(140, *SHAPES[heads], seed=4 + n) for n in range(4)]
    want = torch.cat(Scene("exact", *SHAPES[heads], window=window).step([(0, sequence, 0, 150)]))
    for block_size in (8, 16, 24):
        for chunk in (1, 16, 64, 150):
            scene = Scene("exact", *SHAPES[heads], window=window, block_size=block_size)
            pieces = []
            for start in range(0, 150, chunk):
                count = min(chunk, 150 - start)
                company = [
                    (n + 1, o, start, count)
                    for n, o in enumerate(other[: start % 4])
                    if start + count < 140 and not start
                ]
                pieces.append(scene.step([(0, sequence, start, count), *company])[0])
            assert torch.equal(torch.cat(pieces), want), (block_size, chunk)


def test_exact_decode_bits_do_not_depend_on_the_batch() -> None:
    sequences = [Sequence(100 + 13 * n, 6, 2, seed=n) for n in range(5)]

    def decode(which: list[int]) -> dict[int, torch.Tensor]:
        scene = Scene("exact", 6, 2)
        for row in which:
            scene.step([(row, sequences[row], 0, sequences[row].length - 1)])
        out = scene.step([(row, sequences[row], sequences[row].length - 1, 1) for row in which])
        return dict(zip(which, out, strict=True))

    together = decode([0, 1, 2, 3, 4])
    for which in ([0], [4], [1, 3], [0, 2, 4]):
        for row, out in decode(which).items():
            assert torch.equal(out, together[row])


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("exact", "cpu"),
        # torch's own softmax on CUDA sums few numbers in another order than many.
        pytest.param("exact", "cuda", marks=ON_CUDA),
        pytest.param("triton", "cuda", marks=ON_CUDA),
    ],
)
def test_exact_bits_do_not_depend_on_how_long_the_company_is(name: str, where: str) -> None:
    device, size, heads, kv_heads = torch.device(where), 64, 4, 2
    ops = make_ops("exact", device)
    assert isinstance(ops, ExactOps)
    ops.settle({(8, DIM)}, device)
    shape = KvShape(1, kv_heads, DIM, size, torch.float32)
    backend = make_backend(name, AttentionShape(heads, kv_heads, DIM, (0,)), shape, ops, device)
    cache = KvCache(shape, 80, lambda size, dtype: torch.zeros(size, dtype=dtype, device=device))
    generator = torch.Generator().manual_seed(0)
    cache.data[:, :, :80] = torch.randn(cache.data[:, :, :80].shape, generator=generator).to(device)
    # A row of 1000 tokens and one of 4096, each about to attend for its last token.
    tables = torch.full((3, 64), cache.null_block, dtype=torch.int32)
    tables[0, :16], tables[1] = torch.arange(16), torch.arange(16, 80)
    lengths = torch.tensor([1000, 4096, 1])
    slots = (tables[torch.arange(2), (lengths[:2] - 1) // size] * size + (lengths[:2] - 1) % size).to(torch.int64)
    row_tables = RowTables(tables.to(device), lengths.to(device), size)
    q, k, v = (torch.randn(2, n, DIM, generator=generator).to(device) for n in (heads, kv_heads, kv_heads))

    def attend(count: int) -> torch.Tensor:
        rows = torch.arange(count, device=device)
        decode = DecodePart(None, rows, int(lengths[:count].max()))
        step = backend.begin(cache, StepLayout(slots[:count].to(device), row_tables, decode, (), None))
        return step(0, q[:count], k[:count], v[:count])

    with torch.inference_mode():
        assert torch.equal(attend(2)[0], attend(1)[0])


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_softmax_by_tiles_does_not_depend_on_hidden_tiles(where: str) -> None:
    """What CUDA has in place of torch's own. The bits are those of few keys, few rows and many of both."""
    scores = torch.randn(3, 2, 1000, generator=torch.Generator().manual_seed(0)) * 4
    scores[1, 0, 300:] = -torch.inf

    def weights(rows: int, tiles: int) -> torch.Tensor:
        hidden = torch.full((rows, 2, tiles * TILE - 1000), -torch.inf)
        return tiled_softmax(torch.cat((scores[:rows], hidden), -1).to(where)).cpu()

    want = weights(3, 16)
    torch.testing.assert_close(want[..., :1000], scores.softmax(-1), atol=1e-7, rtol=2e-6)
    for rows, tiles in ((1, 16), (3, 17), (3, 33), (2, 64)):
        got = weights(rows, tiles)
        assert torch.equal(got[..., :1000], want[:rows, ..., :1000]) and not got[..., 1000:].any()


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.attention.registry.why_no_triton", lambda: "")  # as where a compiler is
    shape, cpu = AttentionShape(4, 2, DIM, (0,)), torch.device("cpu")
    assert make_backend("auto", shape, KV, make_ops("fast"), cpu).name == "torch"
    assert make_backend("auto", shape, KV, make_ops("exact"), cpu).name == "exact"
    assert make_backend("auto", shape, KV, make_ops("fast"), torch.device("cuda")).name == "triton"
    for name, numerics in (("nonsense", "fast"), ("exact", "fast"), ("torch", "exact")):
        with pytest.raises(ConfigError) as error:
            make_backend(name, shape, KV, make_ops(numerics), cpu)
        assert error.value.field == "attention_backend"


def test_without_triton_its_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(4, 2, DIM, (0,))
    for module in ("attention.registry", "environment"):
        monkeypatch.setattr(f"executor_svc.{module}.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package triton is missing"):
        make_backend("triton", shape, KV, make_ops("fast"), torch.device("cuda"))
    assert make_backend("auto", shape, KV, make_ops("fast"), torch.device("cuda")).name == "torch"


def test_on_a_cpu_the_triton_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(4, 2, DIM, (0,))
    monkeypatch.setattr("executor_svc.attention.registry._is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make_backend("triton", shape, KV, make_ops("fast"), torch.device("cpu"))


def test_varlen_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, cuda = AttentionShape(4, 2, DIM, (0,)), torch.device("cuda")

    def refused(kv: KvShape = KV, numerics: str = "fast", device: torch.device = cuda) -> str:
        with pytest.raises(ConfigError) as error:
            make_backend("varlen", shape, kv, make_ops(numerics), device)
        assert error.value.field == "attention_backend"
        return error.value.message

    if why_no_varlen():  # the installed torch is too old
        assert "varlen" in refused()
    else:
        assert make_backend("varlen", shape, KV, make_ops("fast"), cuda).name == "varlen"
        assert "CUDA device" in refused(device=torch.device("cpu"))
        assert "float32" in refused(numerics="exact")
        assert "not float32" in refused(KvShape(1, 2, DIM, 256, torch.float32))
        assert "multiple of 8" in refused(KvShape(1, 2, 20, 256, torch.bfloat16))
        assert "block_size 256, not 16" in refused(KvShape(1, 2, DIM, 16, torch.bfloat16))
    monkeypatch.setattr("executor_svc.attention.varlen.find_spec", lambda name: None)
    assert f"torch {torch.__version__} has no torch.nn.attention.varlen" in refused()
    monkeypatch.undo()

    def older(query: torch.Tensor, seqused_k: torch.Tensor | None = None) -> None: ...

    module = SimpleNamespace(varlen_attn=older)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr("executor_svc.attention.varlen.find_spec", lambda name: module)
    assert "lacks block_table, num_splits" in refused()
