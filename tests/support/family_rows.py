"""Fixed combinations of tests/support/family.py, as it prints them: those of every run, with their operations besides append;
those that complete all pairs."""

COVER = """\
e2m1 e8m0 computed head_pair no pow2 pool linear no no k_only f32 both nhd indirect gather append_slots
i8 bf16 computed element yes amax page linear no yes paged bf16 differ pointers dense_i64 gather decode
i4 f32 computed between yes amax pool swizzled yes no latent f16 k hnd dense gather
e2m1 e4m3 computed short no max row linear no no paged f16 v apart per_kv gather decode
e4m3 f16 given between no amax pool linear no no paged f32 differ split dense_i64 gather decode append_slots
e2m1 e4m3 computed short no global page linear no no latent f16 k nhd csr_last gather append_slots
e4m3 f32 computed short no pow2 pool swizzled yes no latent f16 both hnd dense_i64
i4 f16 computed row yes amax row linear no no paged bf16 v kv_inside csr_last decode
i8 bf16 given group no amax pool linear no no paged f16 both kv_inside per_kv gather
e4m3 e8m0 computed row no pow2 row linear no no latent_whole f32 k pointers ring gather append_slots
e2m1 bf16 given element no amax pool linear no no paged bf16 v apart ring decode
i4 f32 computed heads no amax page linear no no continuous f16 both pointers dense decode append_slots
e2m1 e4m3 computed element no amax page linear no yes k_only f16 k hnd csr_last gather
i4 bf16 computed element yes amax pool linear no yes paged bf16 differ scales_apart dense gather decode
e4m3 none computed row no amax pool linear no no latent f32 k rope csr
e2m1 e4m3 computed short no max pool swizzled yes no k_only bf16 both swizzle dense_i64
i8 f32 computed element yes amax pool swizzled no no latent_whole f16 k nhd csr append_slots
i8 f16 computed group yes amax row linear no no paged bf16 v kv_inside indirect
i4 f16 given heads no amax pool linear no no latent bf16 k rope csr gather
e2m1 e4m3 computed short no global pool swizzled no no k_only f32 k swizzle ring
e4m3 e8m0 computed between no pow2 pool swizzled no no paged bf16 v apart per_kv decode
e2m1 f32 given row no amax pool linear no no paged f16 differ apart per_kv
e4m3 e8m0 computed row no pow2 page linear no no latent_whole bf16 k hnd indirect
e4m3 f32 computed element no amax pool linear yes yes k_only f16 both apart dense_i64 gather
e5m2 f32 computed short no pow2 pool swizzled yes no continuous f32 differ kv_inside dense gather decode
i4 f32 computed head_pair yes amax pool linear yes no k_only f32 both split dense_i64
e5m2 e8m0 computed element no pow2 row linear no no latent f16 both apart csr
e4m3 bf16 computed between no amax pool linear no no k_only bf16 both scales_apart csr gather
e2m1 f16 computed group no amax pool swizzled yes no continuous bf16 k apart dense decode
e2m1 e4m3 computed short no global row linear no no latent_whole f16 k pointers csr
e2m1 e4m3 computed short no max page linear no no latent f32 both pointers csr_last append_slots
i8 bf16 computed row yes amax row linear no no paged f32 differ kv_inside dense_i64
e5m2 none computed row no amax pool linear no no paged bf16 differ swizzle indirect gather decode
"""

REST = """\
e5m2 f16 given group no amax pool linear no no latent_whole bf16 k swizzle csr
e4m3 f32 computed heads no amax page linear no no latent bf16 both kv_inside ring
i4 bf16 computed row no amax pool linear no no latent_whole f16 both split csr_last
e2m1 e4m3 computed short no global pool linear yes no latent_whole f32 k scales_apart dense_i64
i8 f16 computed head_pair yes amax pool linear yes no continuous f32 v apart dense
e4m3 e8m0 computed group no pow2 pool swizzled yes no paged f16 both pointers dense
i8 f16 computed short yes amax pool swizzled no no k_only f16 both swizzle ring
e2m1 e8m0 computed between no pow2 row linear no no latent_whole bf16 k kv_inside csr
e4m3 bf16 given heads no amax pool linear no no paged f32 differ hnd per_kv
e2m1 e4m3 computed short no global page linear no no continuous bf16 both split dense
i8 bf16 given short no amax pool linear no no latent f16 k rope indirect
i4 f32 computed group yes amax row linear no no k_only f32 k pointers ring
e5m2 bf16 computed head_pair no amax page linear no no paged bf16 differ nhd ring
i4 f16 computed heads no amax row linear no no latent f16 k nhd dense_i64
i4 bf16 computed heads yes amax pool linear yes no continuous f32 differ swizzle dense
e5m2 none computed row no amax pool linear no no k_only f16 both kv_inside dense_i64
e5m2 f32 computed heads no pow2 pool linear no no latent f16 k scales_apart csr_last
e5m2 f16 computed element no amax page linear no yes k_only bf16 k split csr
e4m3 f16 given head_pair no amax pool linear no no k_only f16 k swizzle csr_last
e4m3 f32 given row no amax pool linear no no continuous f16 both nhd dense
e2m1 e4m3 computed between no amax pool swizzled no no latent bf16 both rope ring
i8 bf16 computed group yes amax pool swizzled no no paged bf16 differ split csr_last
e2m1 e4m3 computed short no global page linear no no paged f32 differ hnd csr
e5m2 f16 given head_pair no amax pool linear no no paged bf16 both pointers per_kv
i8 bf16 computed group no amax row linear no no continuous f32 both hnd dense
e5m2 f32 computed group no pow2 pool linear no no latent bf16 both rope dense_i64
i4 bf16 given element no amax pool linear no no latent f32 k apart indirect
e5m2 e8m0 computed between no pow2 pool swizzled no no continuous bf16 differ swizzle dense
e2m1 e8m0 computed heads no pow2 pool linear no no k_only f32 both apart csr_last
i8 f32 computed between no amax page linear no no paged bf16 both pointers indirect
e4m3 f32 computed element no amax pool linear no yes paged f32 differ kv_inside per_kv
i4 f16 computed short yes amax pool swizzled no no paged bf16 k apart per_kv
e2m1 e4m3 computed short no max row linear no no latent_whole bf16 k kv_inside ring
i8 f16 computed heads no amax pool linear no no latent_whole f32 k scales_apart ring
e2m1 e4m3 computed group no amax pool linear no no k_only f16 both scales_apart indirect
e5m2 none computed row no amax pool linear no no latent_whole f32 both apart dense
i8 f32 computed row yes amax pool linear yes no k_only f16 k swizzle dense
e5m2 none computed row no amax pool linear no no k_only bf16 both hnd ring
i8 bf16 computed element yes amax pool linear no yes continuous f32 differ swizzle dense
e5m2 e8m0 computed short no pow2 page linear no no k_only f16 both split ring
e2m1 f16 computed between no amax pool swizzled yes no continuous f16 both nhd dense
e2m1 e4m3 computed short no max page linear no no paged f16 differ nhd csr
e5m2 none computed row no amax pool linear no no paged f32 both nhd per_kv
e5m2 none computed row no amax pool linear no no paged f32 v apart csr
e2m1 f32 computed group no pow2 pool swizzled no no paged f16 v apart dense_i64
e5m2 e8m0 computed row no pow2 pool linear yes no latent bf16 k scales_apart dense_i64
i8 bf16 computed element yes amax pool swizzled no no latent bf16 k rope csr_last
i8 f16 computed head_pair yes amax page linear no no k_only bf16 both hnd csr
e2m1 e4m3 computed short no max pool linear no no latent bf16 k rope dense
i8 bf16 computed group yes amax page linear no no latent f16 both nhd dense
e4m3 f32 computed element no amax pool linear no yes k_only bf16 k nhd ring
e2m1 e4m3 computed short no global pool linear no no paged f32 both apart per_kv
e5m2 none computed row no amax pool linear no no continuous bf16 both split dense
e2m1 e4m3 computed short no global pool linear no no latent_whole bf16 k kv_inside indirect
e2m1 e8m0 computed heads no pow2 pool linear no no latent f16 both rope indirect
e4m3 none computed row no amax pool linear no no latent f32 both pointers csr_last
e2m1 e8m0 computed head_pair no pow2 pool linear yes no continuous f32 both scales_apart dense
e2m1 e4m3 computed head_pair no amax page linear no no k_only f16 k kv_inside ring
e2m1 e4m3 computed short no max pool linear no no paged f16 both split per_kv
e5m2 f16 computed between no amax pool linear no no latent f32 k nhd csr_last
e2m1 e4m3 computed short no max page linear no no latent_whole bf16 k hnd csr
e2m1 e4m3 computed heads no amax row linear no no latent_whole f32 both pointers ring
e2m1 e4m3 computed short no max pool linear no no latent f32 k scales_apart dense_i64
e2m1 e4m3 computed short no max pool linear no no latent_whole bf16 k pointers indirect
e2m1 e4m3 computed short no max pool swizzled no no paged f16 both swizzle per_kv
e4m3 f16 computed heads no amax page linear no no paged bf16 differ split dense_i64
i8 bf16 computed row no amax pool linear yes no latent f32 both rope dense
e2m1 e4m3 computed row no amax pool linear yes no paged f32 v apart dense
e2m1 f32 computed short no amax pool linear no no paged bf16 both scales_apart per_kv
e2m1 e4m3 computed short no global pool swizzled no no latent bf16 both rope dense
e2m1 e4m3 computed short no max pool linear no no continuous f32 differ apart dense
e2m1 e4m3 computed short no global row linear no no continuous bf16 v apart dense
i4 f32 computed heads no amax pool linear no no paged bf16 v apart per_kv
"""
