"""Attention over a sequence that is sharded over several devices. Runs on torch.distributed: NCCL, HCCL or Gloo.

from diyfa.distributed import context_parallel_attention, shard_sequence

tokens = shard_sequence(tokens, group, dim=1)
...
out = context_parallel_attention(q, k, v, group, causal=True)
"""

from diyfa.distributed.attention import context_parallel_attention
from diyfa.distributed.sharding import shard_positions, shard_sequence, unshard_sequence

__all__ = ["context_parallel_attention", "shard_positions", "shard_sequence", "unshard_sequence"]
