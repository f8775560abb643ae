/* muon.h — the numbers of Muon, which all backends have in common.
 *
 * K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024): a matrix X whose
 * singular values are at most 1 becomes one whose singular values are near 1, by steps of Newton and
 * Schulz of order 5 without the last digits:
 *
 *     A = X X^T,  B = b A + c A A,  X = a X + B X
 *
 * (X has at least as many columns as rows; otherwise A = X^T X and X = a X + X B.) a, b and c are
 * Jordan's: the values go to 0.7 ... 1.2 as fast as possible. X starts as the matrix divided by its
 * Frobenius norm.
 *
 * J. Liu et al., "Muon is Scalable for LLM Training" (2025, Moonshot), 2.2: with 0.2 sqrt(max(rows, cols)) as a
 * factor, elements of steps are as large as AdamW's, so that its learning rates and weight decay
 * serve.
 */
#ifndef LLMC_BACKEND_MUON_H
#define LLMC_BACKEND_MUON_H

#include <math.h>

enum { MUON_STEPS = 5 };

#define MUON_A 3.4445f
#define MUON_B (-4.7750f)
#define MUON_C 2.0315f
#define MUON_TINY 1e-7f /* is added to the norm */

static inline float muon_rate(float learning_rate, int rows, int cols) {
    return (float)(learning_rate * 0.2 * sqrt((double)(rows > cols ? rows : cols)));
}

#endif
