"""Checks that hold on every backend. Each raises ValueError or TypeError with what was expected and what was given.

They read shapes, strides and dtypes, so they do not wait for a device. Besides numbers that are given as tensors, only
`seq_lens` is read from one: once for each version of its contents, and not while a graph is captured or traced.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from diyfa.eight_bits import ARGUMENTS as EIGHT_BIT_ARGUMENTS
from diyfa.eight_bits import EIGHT_BIT_DTYPES, VALUE_DTYPES
from diyfa.features import ATTENTION_DTYPES as ATTENTION_DTYPES
from diyfa.features import Sizes
from diyfa.keywords import BOOLEAN_MASK
from diyfa.masks import BlockMask
from diyfa.options import CHECKED_TENSORS, AttentionOptions, Lengths
from diyfa.problem import LAYOUTS, VARLEN
from diyfa.problem import dtype_name as dtype_name
from diyfa.score_functions import score_function
from diyfa.score_programs import MAX_TENSORS, why_not_differentiable
from diyfa.torch_private import unbatched

MAX_HEAD_DIM = 576  # of q and k: multi-head latent attention joins 512 latent and 64 rotary features
MAX_HEAD_DIM_V = 512
# int and float come first, so that nearly every check is short. Real covers NumPy's scalars, the last two tracing.
_NUMBER = (int, float, Real, torch.SymInt, torch.SymFloat)
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def check_tensors(**tensors: object) -> None:
    """Check that every argument is a dense tensor."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            kind = "a nested tensor" if x.layout is torch.strided else f"layout {x.layout}"
            raise TypeError(f"{name} must be a dense tensor, got {kind}")
        if is_dtensor(x):  # supported DTensors have become local tensors before
            raise TypeError(
                f"{name} is a DTensor: give each rank's part, {name}.to_local(). flash_attention and flash_attn's "
                "functions take DTensors as q, k and v, diyfa.distributed.context_parallel_attention those sharded "
                "along the sequence"
            )


def is_dtensor(x: object) -> bool:
    """Return whether x is a DTensor of PyTorch."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; unless somebody has, there are no DTensors
    return module is not None and isinstance(x, module.DTensor)


def check_booleans(**options: object) -> None:
    """Check that every argument is True or False. If another library's argument is passed as `causal`, name diyfa's."""
    for name, value in options.items():
        if isinstance(value, bool):
            continue
        got = f"a tensor of shape {_shape(value)}" if isinstance(value, torch.Tensor) else repr(value)
        hint = ""
        if name == "causal" and isinstance(value, torch.Tensor):
            hint = "; a mask that is added to the scores is attn_bias=, lengths are seq_lens="
        elif name == "causal" and isinstance(value, float):
            hint = "; a dropout probability is dropout_p=, a scale of the scores sm_scale= or softmax_scale="
        raise TypeError(f"{name} must be True or False, got {got}{hint}")


def check_named_sizes(**sizes: object) -> None:
    """Check that every argument is an integer of at least 0, and numbers of heads of at least 1."""
    for name, value in sizes.items():
        if check_length(name, value) == 0 and name in ("heads", "heads_kv"):
            raise ValueError(f"{name} must be positive, got 0")


def check_same_device(first: torch.Tensor, first_name: str = "q", /, **others: torch.Tensor | None) -> None:
    """Check that every given tensor is on the device of `first`."""
    for name, x in others.items():
        if x is not None and x.device != first.device:
            devices = f"{first_name} is on {first.device}, {name} on {x.device}"
            raise ValueError(f"all tensors must be on the same device: {devices}")


def check_last_stride(**tensors: torch.Tensor) -> None:
    """Check that the last dimension of every tensor has stride 1."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] != 1 and x.numel():
            raise ValueError(f"the last dimension of {name} must have stride 1, got strides {x.stride()}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: tuple[int, int, int, int]) -> None:
    """Check that q, k, v are 4-D, of one dtype and device, and fit. `dims` are (batch, head, sequence, feature)."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"Expected 3D or 4D tensors of one rank, got q {_shape(q)}, k {_shape(k)}, v {_shape(v)}")
    check_sizes(q, k, v, dims)


def check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: tuple[int | None, int, int, int]) -> None:
    """Check tensors of known rank as `check_qkv` does. Packed sequences have no batch dimension."""
    if q.dtype in EIGHT_BIT_DTYPES:
        check_eight_bits(q, k, v)
    elif q.dtype not in ATTENTION_DTYPES:
        raise TypeError(
            f"Unsupported dtype {q.dtype}: expected float16, bfloat16 or float32 (float64: backend='cpu'), or what "
            "diyfa.quantize makes: float8_e4m3fn, float8_e5m2 or int8"
        )
    elif k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"dtypes must match: q is {q.dtype}, k {k.dtype}, v {v.dtype}")
    check_same_device(q, k=k, v=v)
    b, h, s, d = dims
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape  # each access makes a new object
    if k_shape[d] != q_shape[d]:
        raise ValueError(f"q and k must have the same head_dim, got q {_shape(q)} and k {_shape(k)}")
    if b is not None and (k_shape[b] != q_shape[b] or v_shape[b] != q_shape[b]):
        raise ValueError(f"q, k and v must have the same batch, got {_shape(q)}, {_shape(k)}, {_shape(v)}")
    if k_shape[h] != v_shape[h] or k_shape[s] != v_shape[s]:
        raise ValueError(f"k and v must have the same heads and length, got k {_shape(k)} and v {_shape(v)}")
    check_heads(q_shape[h], k_shape[h], q_shape[d], v_shape[d])
    check_last_stride(q=q, k=k, v=v)


def check_heads(heads: int, heads_kv: int, head_dim: int, head_dim_v: int) -> None:
    """Check the numbers of heads and of their features."""
    for names, size, largest in (("q and k", head_dim, MAX_HEAD_DIM), ("v", head_dim_v, MAX_HEAD_DIM_V)):
        if not 1 <= size <= largest:
            raise ValueError(f"Unsupported head_dim: expected 1 to {largest} for {names}, got {size}")
    if heads_kv == 0 or heads == 0 or heads % heads_kv:
        got = f"{heads} and {heads_kv}"
        raise ValueError(f"the query heads must be a positive multiple of the key/value heads, got {got}")


def check_eight_bits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check the dtypes of k and v beside a q of float8 or int8."""
    expected = VALUE_DTYPES if q.dtype == torch.int8 else (q.dtype,)
    if k.dtype != q.dtype or v.dtype not in expected:
        names = " or ".join(dtype_name(x) for x in expected)
        raise TypeError(f"beside q of {q.dtype} k must have the same dtype and v {names}, got k {k.dtype}, v {v.dtype}")


def check_eight_bit_options(q: torch.Tensor, options: dict[str, Any]) -> None:
    """Check what a call of float8 or int8 does not take, or what only such a call takes."""
    if q.dtype not in EIGHT_BIT_DTYPES:
        if given := [name for name in EIGHT_BIT_ARGUMENTS if options.get(name) is not None]:
            raise ValueError(f"{', '.join(given)} belong to q and k of float8 or int8, q is {q.dtype}")
        return
    if options.get("dropout_p"):
        raise ValueError(f"q of {q.dtype} takes no dropout_p: no kernel of float8 or int8 drops weights")


def output_dtype(q: torch.Tensor, v: torch.Tensor, out_dtype: object) -> str:
    """Check `out_dtype`. Return the name of the output's dtype, or "" for that of the inputs."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {type(out_dtype).__name__}")
    if q.dtype not in EIGHT_BIT_DTYPES:
        if out_dtype is not None and out_dtype != q.dtype:
            raise ValueError(f"the output of {q.dtype} inputs has their dtype, got out_dtype={out_dtype}")
        return ""
    if out_dtype is None:
        out_dtype = v.dtype if v.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    if out_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be torch.bfloat16, torch.float16 or torch.float32, got {out_dtype}")
    return dtype_name(out_dtype)


def as_integer(value: Any) -> int:
    """Return an int, a symbolic int, a NumPy integer or an integer tensor of one element as an int or symbolic int.

    Reading a tensor on an accelerator waits for it. Raises TypeError for all else, also for floats and booleans.
    """
    if isinstance(value, bool):
        raise TypeError(f"not an integer: {value}")
    if isinstance(value, (int, torch.SymInt)):  # symbolic lengths stay symbolic
        return value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise TypeError(f"not one integer: a {value.dtype} tensor of shape {_shape(value)}")
        return int(value)
    return operator.index(value)


def check_length(name: str, value: Any) -> int:
    """Check that a value is an integer for `as_integer` and not negative; return it."""
    if not torch.compiler.is_compiling() and type(value) is int and value >= 0:  # a short way for the usual case
        return value
    try:
        length = as_integer(value)
    except TypeError:
        got = f"a {value.dtype} tensor of shape {_shape(value)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(f"{name} must be an integer, got {got}") from None
    if torch.compiler.is_compiling():  # lengths computed inside the graph have no values yet
        torch._check(length >= 0)
    elif length < 0:
        raise ValueError(f"{name} must not be negative, got {length}")
    return length


def check_window(window: object, name: str = "window") -> tuple[int, int]:
    """Check a pair (left, right) of integers, each -1 (unbounded) or more; return it as a tuple without tensors."""
    if type(window) is tuple and len(window) == 2:  # a short way for the usual case
        left, right = window
        if type(left) is int and type(right) is int and left >= -1 and right >= -1:
            return window
    try:
        left, right = (as_integer(x) for x in window)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair of integers (left, right), got {window!r}") from None
    if torch.compiler.is_compiling():  # numbers read from a tensor have no value yet
        torch._check(left >= -1)
        torch._check(right >= -1)
    elif left < -1 or right < -1:
        raise ValueError(f"window sizes must be -1 (unbounded) or more, got ({left}, {right})")
    return left, right


def check_scalars(sm_scale: float | None, softcap: float, dropout_p: float, scale_name: str = "sm_scale") -> None:
    """Check that the scale is finite, softcap not negative and the dropout probability in [0, 1)."""
    if sm_scale is not None and not isinstance(sm_scale, _NUMBER):
        raise TypeError(f"{scale_name} must be a number, got {type(sm_scale).__name__}")
    if sm_scale is not None and not -_LARGEST <= sm_scale <= _LARGEST:
        raise ValueError(f"{scale_name} must be finite in float32, got {sm_scale}")
    if not isinstance(softcap, _NUMBER):
        raise TypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if softcap != 0 and not _SMALLEST <= softcap <= _LARGEST:
        raise ValueError(f"softcap must be 0 (off) or a positive number that float32 holds, got {softcap}")
    if not isinstance(dropout_p, _NUMBER):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def is_capturing(x: torch.Tensor) -> bool:
    """Return whether the current stream of x's device type captures a device graph, or a graph is traced."""
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return True
    module = getattr(torch, x.device.type, None)
    capturing = getattr(module, "is_current_stream_capturing", None)
    return bool(capturing is not None and x.device.type != "cpu" and capturing())


# Lengths -> (version, smallest, largest): reading them waits for the device.
_lengths_read = WeakTensorKeyDictionary()


def _value_bounds(lengths: torch.Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value, read once for each tensor and version of its contents."""
    lengths = unbatched(lengths)
    if lengths.is_inference():  # has no version
        values = lengths.cpu()
        return int(values.min()), int(values.max())
    read = _lengths_read.get(lengths)
    if read is None or read[0] != lengths._version:
        values = lengths.detach().cpu()
        read = _lengths_read[lengths] = (lengths._version, int(values.min()), int(values.max()))
    return read[1], read[2]


def check_offsets(side: str, cu_seqlens: torch.Tensor, longest: int, total: int) -> None:
    """Check that cu_seqlens_q or cu_seqlens_k on the CPU ascends within `total` rows in steps of at most `longest`."""
    name, offsets = f"cu_seqlens_{side}", cu_seqlens.tolist()
    rows = [end - start for start, end in pairwise(offsets)]
    if offsets[0] < 0 or offsets[-1] > total or min(rows, default=0) < 0:
        raise ValueError(f"{name} must ascend from 0 or more to at most {total}, got {offsets}")
    if max(rows, default=0) > longest:
        raise ValueError(f"{name} has a sequence of {max(rows)}, beyond max_seqlen_{side}={longest}")


def check_values(lengths: Lengths, q: torch.Tensor, k: torch.Tensor, layout: str) -> None:
    """Check that the values of lengths fit q and k, if the host may read them: seq_lens, and packed lengths on the CPU.
    Lengths have passed the other checks."""
    seq_lens, cu_seqlens_q, cu_seqlens_k = lengths.seq_lens, lengths.cu_seqlens_q, lengths.cu_seqlens_k
    if seq_lens is not None and seq_lens.numel() and not (seq_lens.is_meta or is_capturing(seq_lens)):
        seqlen_k = k.shape[LAYOUTS[layout][2]]
        low, high = _value_bounds(seq_lens)
        if low <= 0 or high > seqlen_k:
            raise ValueError(f"seq_lens must satisfy 0 < length <= {seqlen_k}, got values from {low} to {high}")
    if cu_seqlens_q is not None and cu_seqlens_q.is_cpu and not is_capturing(cu_seqlens_q):
        check_offsets("q", cu_seqlens_q, lengths.max_seqlen_q, q.shape[0])
        if cu_seqlens_k is not None:
            check_offsets("k", cu_seqlens_k, lengths.max_seqlen_k, k.shape[0])


def check_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> None:
    """Check packed sequences: q (Tq, H, D), k and v (Tk, Hk, D), cumulative lengths (B + 1,) int32 on q's device."""
    cu_seqlens_q, cu_seqlens_k = lengths.cu_seqlens_q, lengths.cu_seqlens_k
    check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    assert cu_seqlens_q is not None and cu_seqlens_k is not None, "they are tensors"
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"Expected packed (total, heads, head_dim) tensors, got q {_shape(q)}, k {_shape(k)}, v {_shape(v)}"
        )
    check_sizes(q, k, v, (None, 1, 0, 2))
    check_same_device(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.stride(0) != 1:
            raise ValueError(f"{name} must be a contiguous vector of B + 1 offsets, got shape {_shape(cu_seqlens)}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must name as many sequences, got shapes {_shape(cu_seqlens_q)} and "
            f"{_shape(cu_seqlens_k)}"
        )


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, layout: str) -> Sizes:
    """Check that q, k, v and packed lengths fit; return the sizes that optional tensors must have."""
    if layout == VARLEN:
        check_packed(q, k, v, lengths)
        assert lengths.cu_seqlens_q is not None, "checked above"
        batch, heads = lengths.cu_seqlens_q.shape[0] - 1, q.shape[1]
        return {
            "B": batch, "H": heads, "Hk": k.shape[1], "Sq": lengths.max_seqlen_q, "Sk": lengths.max_seqlen_k,
            "D": k.shape[2], "Dv": v.shape[2],
        }  # fmt: skip
    check_qkv(q, k, v, LAYOUTS[layout])
    b, h, s, d = LAYOUTS[layout]
    return {
        "B": q.shape[b], "H": q.shape[h], "Hk": k.shape[h], "Sq": q.shape[s], "Sk": k.shape[s], "D": k.shape[d],
        "Dv": v.shape[d],
    }  # fmt: skip


MASK_TENSORS = ("mask_blocks", "mask_bits")


def check_optional_tensors(q: torch.Tensor, sizes: Sizes, arguments: dict[str, Any]) -> None:
    """Check kind, dtype, shape and device of the optional tensors in `arguments` by their rows in the table."""
    for name, feature in CHECKED_TENSORS.items():
        x = arguments.get(name)
        if x is None:
            continue
        if name in MASK_TENSORS:
            name = "mask"  # the argument that they are parts of
        elif name.startswith("score_tensor"):
            name = f"score_tensors[{name[-1]}]"
        check_tensors(**{name: x})
        if x.dtype not in feature.dtypes:
            hint = f"; {BOOLEAN_MASK}" if x.dtype == torch.bool and name == "attn_bias" else ""
            raise TypeError(f"{name} must be {feature.dtypes_in_words}, got {x.dtype}{hint}")
        assert feature.shape is not None, "or it is not checked here"
        if problem := feature.shape.refuses(x, sizes):
            raise ValueError(f"{name} must {problem}")
        check_same_device(q, **{name: x})


def check_mask(mask: Any, q: Any, k: Any, arguments: dict[str, Any], window_name: str) -> None:
    """Check that a block mask is one, that it fits the lengths of q and k, and that no other mask is given."""
    if not isinstance(mask, BlockMask):
        hint = ""
        if isinstance(mask, torch.Tensor):
            hint = "; a boolean tensor becomes one by BlockMask.from_dense, what is added to the scores is attn_bias="
        elif type(mask).__name__ == "BlockMask":
            hint = " of another library; FlexAttention's becomes one by diyfa.BlockMask.from_flex"
        raise TypeError(f"mask must be a diyfa.BlockMask, got {type(mask).__name__}{hint}")
    if arguments["causal"] or arguments["window"] != (-1, -1):
        raise ValueError(
            f"mask takes the place of causal and {window_name}: put them into it, as "
            "masks.all_of(masks.causal, …) and masks.sliding_window of diyfa.masks do"
        )
    if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and min(q.dim(), k.dim()) >= 3:
        s = -2 if arguments["layout"] == "bhsd" else 1
        sizes = q.shape[s], k.shape[s]
        if mask.shape[2:] != sizes:
            expected = f"{mask.shape[2]} queries and {mask.shape[3]} keys"
            raise ValueError(f"mask is for {expected}, got {sizes[0]} and {sizes[1]}")


def checked_score_function(score_fn: Any, tensors: Any, score_grad_fn: Any) -> dict[str, Any]:
    """Return the program of a score function and its captured tensors, as fields of `AttentionOptions`."""
    if score_fn is None:
        given = "score_tensors" if score_grad_fn is None else "score_grad_fn"
        raise ValueError(f"{given} belongs to score_fn, which is not given")
    function = score_function(score_fn, score_grad_fn)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, (tuple, list)):
        raise TypeError(f"score_tensors must be a tuple of tensors, got {type(tensors).__name__}")
    if len(tensors) != function.tensors:
        expected = f"{function.tensors} captured tensors"
        raise ValueError(f"{function.name} takes {expected}, got {len(tensors)} in score_tensors")
    for n, x in enumerate(tensors):
        if x is None:  # an option that is not given, and so not checked later
            check_tensors(**{f"score_tensors[{n}]": x})
    return {"score_fn": function.source, **{f"score_tensor{n}": x for n, x in enumerate(tensors)}}


def check_no_score_function(score_fn: Any, tensors: Any, score_grad_fn: Any) -> None:
    """Refuse a score function where there is none, in calls over a cache."""
    if score_fn is not None or score_grad_fn is not None or tensors != ():
        raise ValueError("a call over a cache (block_table, seqused_k, out) takes no score_fn")


def check_derivatives(options: AttentionOptions) -> None:
    """Check that the score function of a call, if it has one, has the derivatives that a backward pass needs."""
    if options.score_fn and options.needs_grad:
        tensors = [getattr(options, f"score_tensor{n}") for n in range(MAX_TENSORS)]
        learned = tuple([options.score_grad and x is not None and x.is_floating_point() for x in tensors])
        if reason := why_not_differentiable(options.score_fn, learned):
            raise ValueError(reason)


def check_batch_invariant(lengths: Lengths, options: dict[str, Any]) -> None:
    """Check that a call has nothing that the mode `diyfa.batch_invariant` does not compute."""
    used_options = {
        "attn_bias": options.get("attn_bias") is not None, "dropout_p": bool(options.get("dropout_p")),
        "seq_lens": lengths.seq_lens is not None, "mask": options.get("mask_blocks") is not None,
        "score_fn": bool(options.get("score_fn")),
    }  # fmt: skip
    if refused := [name for name, is_used in used_options.items() if is_used]:
        raise ValueError(f"diyfa.batch_invariant() takes no {', '.join(refused)}: a cache has nothing like it to equal")


def check_not_expanded(**tensors: torch.Tensor) -> None:
    """Check that a tensor that is written has memory for each of its elements."""
    for name, x in tensors.items():
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"{name} must not be expanded where it is written, got strides {x.stride()}")


def check_no_overlap(out: torch.Tensor, inputs: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
    """Check that out shares no memory with the inputs."""
    for x, name in zip(inputs, names, strict=False):
        if x is not None and share_memory(out, x):
            raise ValueError(f"out must not share memory with {name}")


def _have_common_element(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Return whether two tensors have an element in common, if the second begins `distance` elements behind the first.
    `dims`: (stride, size of the first, size of the second), the largest stride first."""
    if not dims:
        return distance == 0
    (stride, size, other), *inner = dims
    if stride == 0:
        return _have_common_element(distance, inner)
    steps = distance // stride
    return any(-other < n < size and _have_common_element(distance - n * stride, inner) for n in (steps, steps + 1))


def memory_span(x: torch.Tensor) -> int:
    """Return the number of elements in memory from the first to the last of x, which is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def have_equal_strides(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether tensors of one shape have equal strides, except for dimensions of size 1."""
    strides = x.stride(), y.stride()
    return strides[0] == strides[1] or all(n == 1 or a == b for n, a, b in zip(x.shape, *strides, strict=True))


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether x and y have an element in common, for dense tensors and views of equal strides in any order. For
    others assume that they have none, as interleaved slices of one buffer. Tensors without memory share none."""
    if x.is_meta or not x.numel() or not y.numel():
        return False
    # Tensors of one memory may have storages of their own: from NumPy or DLPack.
    storages = x.untyped_storage(), y.untyped_storage()
    first, second = storages[0].data_ptr(), storages[1].data_ptr()
    if first + storages[0].nbytes() <= second or second + storages[1].nbytes() <= first:
        return False
    spans = [memory_span(x), memory_span(y)]
    size = x.element_size()
    begins = x.data_ptr(), y.data_ptr()
    if begins[0] + spans[0] * size <= begins[1] or begins[1] + spans[1] * y.element_size() <= begins[0]:
        return False
    if spans == [x.numel(), y.numel()]:
        return True
    if x.dtype != y.dtype:
        return False
    # Stride -> sizes in x and in y. The stride of a dimension of size 1 has no meaning.
    sizes: dict[int, list[int]] = {}
    for i, z in enumerate((x, y)):
        for n, stride in zip(z.shape, z.stride(), strict=True):
            if n > 1:
                sizes.setdefault(stride, [1, 1])[i] += n - 1
    dims = [(stride, n, other) for stride, (n, other) in sorted(sizes.items(), reverse=True)]
    return _have_common_element((begins[1] - begins[0]) // size, dims)
