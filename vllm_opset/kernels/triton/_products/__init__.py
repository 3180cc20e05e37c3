"""What matrix products share: those of `linear` and of `grouped_gemm`, and the loading warps also `paged_attention`."""
