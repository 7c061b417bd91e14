"""What the bytes of a page mean: the row formats that engines are known to use, by name.

Owns: the formats, every size that follows from one, and the check of a layout (read off the tensors) against one. Must not: hold
memory, or decide a size that the tensors contradict: a disagreement is a refusal that names the field and both values.

A *row* is what one plane keeps of a token, or of ``row_tokens`` tokens where a model compresses them. A page holds its rows one
after the other (*interleaved*), or field by field (*planar*): all rows' first field, then all rows' second. Padding, where there is
any, comes last and belongs to the page.

Sources of the formats, in bytes for each token and layer:

    mla_bf16           1152   DeepSeek V2/V3 multi-head latent attention: 512 latent + 64 rope values
    mla_fp8_ds          656   FlashMLA's and vLLM's "fp8_ds_mla": 512 e4m3, 4 scales (one for 128 values), 64 rope values in bf16
    dsa_index_k_fp8     132   DeepSeek V3.2's indexer: 128 e4m3 and a scale; planar in pages, 64 × 128 B of keys and then 64 × 4 B of scales
    dsa_index_k_bf16    256   the same keys as bf16, without a scale
    mha                       2 × kv_heads × head_dim × itemsize: K and V are planes of their own
    deepseek_v4_c4/c128       rows of 584 bytes for 4 or 128 tokens, pages padded to a multiple of 576
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdxfer.core.reasons import Refused

from .layout import PoolLayout, itemsize_of, layout_of
from .tensors import dense, torch_name

RAW: Final = frozenset(("uint8", "int8"))  # how tensors of mixed fields are typed, and any tensor may be


@dataclass(frozen=True)
class Field:
    """``count`` numbers of ``dtype`` in each row."""

    name: str
    dtype: str
    count: int

    @property
    def bytes(self) -> int:
        return self.count * itemsize_of(self.dtype)


@dataclass(frozen=True)
class PageFormat:
    """``planes``: of a layer (2 where K and V lie apart). ``page_multiple``: pages are padded to a multiple of so many bytes.

    ``heads``: how many heads the fields of a row are split into, over ``tp_size`` tensor-parallel ranks; 0 where every rank holds all.
    """

    name: str
    about: str
    fields: tuple[Field, ...]
    planar: bool = False
    row_tokens: int = 1
    page_multiple: int = 1
    planes: int = 1
    heads: int = 0
    tp_size: int = 1

    @property
    def row_bytes(self) -> int:
        """Of one row in one plane."""
        return sum(field.bytes for field in self.fields)

    @property
    def token_bytes(self) -> float:
        """Bytes for each token and layer on one rank, without padding."""
        return self.planes * self.row_bytes / self.row_tokens

    def rows(self, page_tokens: int) -> int:
        """Rows of a page. Raises Refused('bad_layout') when a page would end within a row."""
        if page_tokens < 1 or page_tokens % self.row_tokens:
            raise Refused(
                "bad_layout",
                f"preset {self.name!r}: page_tokens is {page_tokens}, expected a multiple of {self.row_tokens}, the tokens of a row",
            )
        return page_tokens // self.row_tokens

    def padding(self, page_tokens: int) -> int:
        """Bytes at the end of a page that hold nothing. Raises Refused('bad_layout')."""
        return -(self.rows(page_tokens) * self.row_bytes) % self.page_multiple

    def page_bytes(self, page_tokens: int) -> int:
        """Of one page in one plane, padding included. Raises Refused('bad_layout')."""
        return self.rows(page_tokens) * self.row_bytes + self.padding(page_tokens)

    def places(self, page_tokens: int) -> Iterator[tuple[Field, int, int]]:
        """Where each field's values lie in a page: (field, offset of the first row's, bytes from a row's to the next row's)."""
        rows, at = self.rows(page_tokens), 0
        for field in self.fields:
            yield field, at, field.bytes if self.planar else self.row_bytes
            at += field.bytes * (rows if self.planar else 1)

    @property
    def row(self) -> str:
        """The row in words: what two workers must agree on, whatever type their tensors have."""
        fields = "+".join(f"{f.name}:{f.count}x{f.dtype}" for f in self.fields)
        notes = [f"{self.row_tokens} tokens"] * (self.row_tokens > 1) + ["planar"] * self.planar
        notes += [f"1/{self.tp_size} of {self.heads} heads"] * (self.tp_size > 1)
        return fields + (f" ({', '.join(notes)})" if notes else "")

    @property
    def dtype(self) -> str:
        """Of a tensor made for it: the fields' own, or bytes where they differ or are padded."""
        dtypes = {field.dtype for field in self.fields}
        return dtypes.pop() if len(dtypes) == 1 and self.page_multiple == 1 else "uint8"

    def layout(self, pool: str, page_tokens: int, layers: int) -> PoolLayout:
        """For memory that is to be allocated. Raises Refused('bad_layout')."""
        size, itemsize = self.page_bytes(page_tokens), itemsize_of(self.dtype)
        rows = self.rows(page_tokens)
        whole = self.dtype != "uint8" or len(self.fields) == 1
        shape = (rows, size // itemsize // rows) if whole and size == rows * self.row_bytes else (size,)
        return PoolLayout(
            pool, self.dtype, shape, page_tokens, planes=layers * self.planes, planes_per_layer=self.planes, row=self.row
        )  # fmt: skip

    def check(self, layout: PoolLayout) -> None:
        """Raise Refused('bad_layout') where ``layout``, which was read off the tensors, is not this format."""
        expected = self.page_bytes(layout.page_tokens)
        who = f"pool {layout.name!r}, preset {self.name!r}"
        if layout.page_bytes != expected:
            tokens = layout.page_tokens
            raise Refused(
                "bad_layout",
                f"{who}: a page of {tokens} tokens has {layout.page_bytes} bytes, which is {layout.page_bytes / tokens:g} a token"
                f" ({'×'.join(map(str, layout.page_shape))} of {layout.dtype}), expected {expected}, which is"
                f" {expected / tokens:g} a token ({self.row}); the tensors decide: name the preset that they are of",
            )
        dtypes = {field.dtype for field in self.fields}
        fits = RAW | (dtypes if len(dtypes) == 1 else frozenset())
        if layout.dtype not in fits:
            raise Refused(
                "bad_layout",
                f"{who}: dtype is {layout.dtype}, expected {' or '.join(sorted(fits))} ({self.row}); name the preset that the"
                " tensors are of",
            )
        if layout.planes_per_layer != self.planes:
            raise Refused(
                "bad_layout",
                f"{who}: planes_per_layer is {layout.planes_per_layer}, expected {self.planes}; check page_dim",
            )


_ROPE: Final = Field("rope", "bfloat16", 64)
_FIXED: Final = {
    f.name: f
    for f in (
        PageFormat(
            "mla_bf16",
            "multi-head latent attention, bf16: one latent for all heads, the same on every rank",
            (Field("latent", "bfloat16", 512), _ROPE),
        ),
        PageFormat(
            "mla_fp8_ds",
            "multi-head latent attention, fp8 with a scale for 128 values, rope in bf16",
            (Field("latent", "float8_e4m3fn", 512), Field("scale", "float32", 4), _ROPE),
        ),
        PageFormat(
            "dsa_index_k_fp8",
            "index keys of sparse attention, fp8 with a scale for each key; planar: keys first, then scales",
            (Field("key", "float8_e4m3fn", 128), Field("scale", "float32", 1)),
            planar=True,
        ),
        PageFormat(
            "dsa_index_k_bf16",
            "index keys of sparse attention, bf16, without a scale",
            (Field("key", "bfloat16", 128),),
        ),
        PageFormat(
            "deepseek_v4_c4",
            "DeepSeek V4, 4 tokens compressed into a row; window and state pools have pages of their own",
            (Field("row", "uint8", 584),),
            row_tokens=4,
            page_multiple=576,
        ),
        PageFormat(
            "deepseek_v4_c128",
            "DeepSeek V4, 128 tokens compressed into a row",
            (Field("row", "uint8", 584),),
            row_tokens=128,
            page_multiple=576,
        ),
    )
}
_MHA: Final = "mha"
NAMES: Final = (*_FIXED, _MHA)
EXAMPLES: Final = (
    *_FIXED,
    "mha:kv_heads=3,head_dim=64,dtype=bfloat16",
    "mha:kv_heads=8,head_dim=128,dtype=bfloat16,tp_size=2",
)


def mha(kv_heads: int, head_dim: int, dtype: str = "bfloat16", tp_size: int = 1) -> PageFormat:
    """Multi-head or grouped-query attention: K and V of ``kv_heads`` heads, of which each of ``tp_size`` ranks holds its share.

    Raises Refused('bad_layout'): numbers below 1, heads that do not divide among the ranks, an unknown dtype.
    """
    for name, value in (("kv_heads", kv_heads), ("head_dim", head_dim), ("tp_size", tp_size)):
        if value < 1:
            raise Refused("bad_layout", f"preset 'mha': {name} is {value}, expected 1 or more")
    if kv_heads % tp_size:
        raise Refused("bad_layout", f"preset 'mha': kv_heads is {kv_heads}, expected a multiple of tp_size, {tp_size}")
    itemsize_of(dtype)
    field = Field("kv", dtype, kv_heads // tp_size * head_dim)
    about = "multi-head or grouped-query attention: K and V, each a plane of its own, heads split over the ranks"
    return PageFormat(_MHA, about, (field,), planes=2, heads=kv_heads, tp_size=tp_size)


def preset(spec: str) -> PageFormat:
    """By its name, for ``mha`` with its numbers: ``mha:kv_heads=3,head_dim=64,dtype=bfloat16,tp_size=1``.

    Raises Refused('bad_layout'): an unknown name or key, a key that is missing or no number.
    """
    name, _, rest = spec.partition(":")
    if name in _FIXED and not rest:
        return _FIXED[name]
    if name != _MHA:
        near = difflib.get_close_matches(name, NAMES, 1)
        problem = f"takes no keys, found {rest!r}" if name in _FIXED else "is unknown"
        hint = f"; did you mean {near[0]!r}?" if near and name not in _FIXED else f"; there are {', '.join(NAMES)}"
        raise Refused("bad_layout", f"preset {name!r} {problem}{hint}")
    return _mha_of(dict(part.partition("=")[::2] for part in rest.split(",") if part))


def _mha_of(keys: Mapping[str, str]) -> PageFormat:
    numbers, known = ("kv_heads", "head_dim", "tp_size"), {"kv_heads", "head_dim", "tp_size", "dtype"}
    if wrong := sorted(set(keys) - known):
        raise Refused("bad_layout", f"preset 'mha': unknown key {wrong[0]!r}, expected {', '.join(sorted(known))}")
    for name in ("kv_heads", "head_dim"):
        if name not in keys:
            raise Refused("bad_layout", f"preset 'mha': {name} is missing; for example {EXAMPLES[-2]}")
    for name in numbers:
        if name in keys and not keys[name].isdecimal():
            raise Refused("bad_layout", f"preset 'mha': {name} is {keys[name]!r}, expected a whole number")
    return mha(
        int(keys["kv_heads"]), int(keys["head_dim"]), keys.get("dtype", "bfloat16"), int(keys.get("tp_size", "1"))
    )


def check_dense(
    spec: str, who: str, dtype: str, shape: Sequence[int], page_tokens: int = 0, page_dim: int = 0
) -> tuple[PoolLayout, int]:
    """Check a tensor that is known by its dtype and shape, one dense block: its layout and its number of pages.

    ``dtype`` is torch's name or safetensors'; ``page_tokens`` 0: as many as the dimension after ``page_dim`` has rows.
    Raises Refused('bad_layout').
    """
    format = preset(spec)
    dtype = torch_name(dtype)
    if not page_tokens:
        if not 0 <= page_dim < len(shape) - 1:
            raise Refused(
                "bad_layout",
                f"{who}: shape {tuple(shape)} with page_dim {page_dim} does not say the tokens of a page: name them",
            )
        page_tokens = shape[page_dim + 1] * format.row_tokens
    pages = dense(dtype, itemsize_of(dtype), tuple(shape), page_dim, who)
    layout = layout_of(who, [pages], page_tokens, row=format.row)
    format.check(layout)
    return layout, pages.num_pages
