"""XLA's options that compile for described GPUs in half the time: products by cuBLAS, softmaxes by plain kernels.

What a step sends does not depend on it. Tests of what it holds, and of its time, say which of their programs have them.
"""

WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "triton-softmax-rewriter"}
