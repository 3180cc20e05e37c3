"""What products of `linear` and `grouped_gemm` share. `paged_attention` takes its loading warps from here, too."""
