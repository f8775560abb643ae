/* matmul.h — matrix products of the CPU backend in float32, by the BLAS library (gemm.h).
 * Included by backend_cpu.c only. */
#ifndef LLMC_BACKEND_CPU_MATMUL_H
#define LLMC_BACKEND_CPU_MATMUL_H

#include "llmc/backend/backend.h"
#include "llmc/backend/cpu/gemm.h"

#define MATMUL_NAME GEMM_NAME

static void matmul_forward(tensor *out, const tensor *x, const weight *w, int N, int I, int O) {
    gemm_parallel(false, true, N, O, I, (const float *)x, I, (const float *)w, I, 0, (float *)out,
                  O);
}

static void matmul_backward_input(tensor *dx, const tensor *dout, const weight *w, int N, int I,
                                  int O, bool accumulate) {
    gemm_parallel(false, false, N, I, O, (const float *)dout, O, (const float *)w, I, accumulate,
                  (float *)dx, I);
}

static void matmul_backward_weight(float *dw, const tensor *dout, const tensor *x, int N, int I,
                                   int O, bool accumulate) {
    gemm_parallel(true, false, O, I, N, (const float *)dout, O, (const float *)x, I, accumulate, dw,
                  I);
}

#endif
