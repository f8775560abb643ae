/* operators_reference.h — the operations of llmc/backend/backend.h in float64, written as the
 * formulas stand in the papers and with no thought of speed. test_operators.c compares backends
 * with them. Gradients overwrite; the test adds where an operation accumulates. */
#ifndef TEST_OPERATORS_REFERENCE_H
#define TEST_OPERATORS_REFERENCE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* rstd may be NULL. */
static inline void reference_rmsnorm(double *out, double *rstd, const double *x, const double *w,
                                     int N, int C, double eps) {
    for (int n = 0; n < N; n++) {
        double sum = 0;
        for (int i = 0; i < C; i++) sum += x[n * C + i] * x[n * C + i];
        double r = 1 / sqrt(sum / C + eps);
        if (rstd) rstd[n] = r;
        for (int i = 0; i < C; i++) out[n * C + i] = x[n * C + i] * r * w[i];
    }
}

static inline void reference_rmsnorm_backward(double *dx, double *dw, const double *dout,
                                              const double *x, const double *w, const double *rstd,
                                              int N, int C) {
    for (int i = 0; i < C; i++) dw[i] = 0;
    for (int n = 0; n < N; n++) {
        double r = rstd[n], dot = 0;
        for (int i = 0; i < C; i++) {
            dw[i] += dout[n * C + i] * x[n * C + i] * r;
            dot += dout[n * C + i] * w[i] * x[n * C + i];
        }
        for (int i = 0; i < C; i++)
            dx[n * C + i] = r * dout[n * C + i] * w[i] - r * r * r / C * dot * x[n * C + i];
    }
}

static inline void reference_matmul(double *out, const double *x, const double *w, int N, int I,
                                    int O) {
    for (int n = 0; n < N; n++)
        for (int o = 0; o < O; o++) {
            double sum = 0;
            for (int i = 0; i < I; i++) sum += x[n * I + i] * w[o * I + i];
            out[n * O + o] = sum;
        }
}

static inline void reference_matmul_backward(double *dx, double *dw, const double *dout,
                                             const double *x, const double *w, int N, int I,
                                             int O) {
    memset(dx, 0, sizeof(double) * N * I);
    memset(dw, 0, sizeof(double) * O * I);
    for (int n = 0; n < N; n++)
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i++) {
                dx[n * I + i] += dout[n * O + o] * w[o * I + i];
                dw[o * I + i] += dout[n * O + o] * x[n * I + i];
            }
}

/* Element i of a head's lower half and its partner are one complex number, turned by an angle. */
static inline void reference_rope(double *qkv, const double *cosine, const double *sine, int B,
                                  int T, int H, int K, int D, int backward) {
    for (int n = 0; n < B * T; n++)
        for (int h = 0; h < H + K; h++)
            for (int i = 0; i < D / 2; i++) {
                double *low = qkv + ((size_t)n * (H + 2 * K) + h) * D + i, *high = low + D / 2;
                double a = *low, b = *high, c = cosine[n % T * (D / 2) + i];
                double s = sine[n % T * (D / 2) + i] * (backward ? -1 : 1);
                *low = a * c - b * s;
                *high = a * s + b * c;
            }
}

/* probability (T, T) of one sequence and query head; row t from key 0 to t, else 0. */
static inline void reference_attention_probability(double *probability, double *log_sum_exp,
                                                   const double *q, const double *k, size_t width,
                                                   int T, int D) {
    for (int t = 0; t < T; t++) {
        double *row = probability + (size_t)t * T, max = -INFINITY, sum = 0;
        for (int j = 0; j < T; j++) {
            row[j] = 0;
            for (int d = 0; j <= t && d < D; d++)
                row[j] += q[t * width + d] * k[j * width + d] / sqrt((double)D);
            if (j <= t && row[j] > max) max = row[j];
        }
        for (int j = 0; j <= t; j++) sum += exp(row[j] - max);
        for (int j = 0; j <= t; j++) row[j] = exp(row[j] - max) / sum;
        if (log_sum_exp) log_sum_exp[t] = max + log(sum);
    }
}

/* log_sum_exp may be NULL. */
static inline void reference_attention(double *out, double *log_sum_exp, const double *qkv, int B,
                                       int T, int H, int K, int D) {
    size_t width = (size_t)(H + 2 * K) * D;
    double *p = (double *)malloc(sizeof(double) * T * T);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++) {
            const double *row = qkv + b * T * width, *q = row + h * D;
            const double *k = row + (H + h / (H / K)) * D, *v = k + K * D;
            double *lse = log_sum_exp ? log_sum_exp + (b * H + h) * T : NULL;
            reference_attention_probability(p, lse, q, k, width, T, D);
            for (int t = 0; t < T; t++)
                for (int d = 0; d < D; d++) {
                    double sum = 0;
                    for (int j = 0; j <= t; j++) sum += p[t * T + j] * v[j * width + d];
                    out[((size_t)(b * T + t) * H + h) * D + d] = sum;
                }
        }
    free(p);
}

static inline void reference_attention_backward(double *dqkv, const double *dout, const double *qkv,
                                                int B, int T, int H, int K, int D) {
    size_t width = (size_t)(H + 2 * K) * D;
    double *p = (double *)malloc(sizeof(double) * T * T),
           *dp = (double *)malloc(sizeof(double) * T);
    memset(dqkv, 0, sizeof(double) * B * T * width);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++) {
            size_t at_q = b * T * width + h * D, at_k = b * T * width + (H + h / (H / K)) * D;
            const double *q = qkv + at_q, *k = qkv + at_k, *v = k + K * D;
            double *dq = dqkv + at_q, *dk = dqkv + at_k, *dv = dk + K * D;
            reference_attention_probability(p, NULL, q, k, width, T, D);
            for (int t = 0; t < T; t++) {
                const double *d_out = dout + ((size_t)(b * T + t) * H + h) * D;
                double dot = 0;
                for (int j = 0; j <= t; j++) {
                    dp[j] = 0;
                    for (int d = 0; d < D; d++) {
                        dp[j] += d_out[d] * v[j * width + d];
                        dv[j * width + d] += p[t * T + j] * d_out[d];
                    }
                    dot += dp[j] * p[t * T + j];
                }
                for (int j = 0; j <= t; j++) {
                    double dlogit = p[t * T + j] * (dp[j] - dot) / sqrt((double)D);
                    for (int d = 0; d < D; d++) {
                        dq[t * width + d] += dlogit * k[j * width + d];
                        dk[j * width + d] += dlogit * q[t * width + d];
                    }
                }
            }
        }
    free(p);
    free(dp);
}

static inline void reference_swiglu(double *out, const double *gate_up, int N, int F) {
    for (int n = 0; n < N; n++)
        for (int i = 0; i < F; i++) {
            double gate = gate_up[(size_t)n * 2 * F + i], up = gate_up[(size_t)n * 2 * F + F + i];
            out[(size_t)n * F + i] = gate / (1 + exp(-gate)) * up;
        }
}

static inline void reference_swiglu_backward(double *dgate_up, const double *dout,
                                             const double *gate_up, int N, int F) {
    for (int n = 0; n < N; n++)
        for (int i = 0; i < F; i++) {
            size_t at = (size_t)n * 2 * F + i;
            double gate = gate_up[at], up = gate_up[at + F], s = 1 / (1 + exp(-gate));
            double d = dout[(size_t)n * F + i];
            dgate_up[at] = d * up * s * (1 + gate * (1 - s));
            dgate_up[at + F] = d * gate * s;
        }
}

/* dx, dw may be NULL. */
static inline void reference_classifier(double *losses, double *dx, double *dw, const double *x,
                                        const double *w, const int32_t *targets, int N, int C,
                                        int V, double scale) {
    double *p = (double *)malloc(sizeof(double) * V);
    if (dx) memset(dx, 0, sizeof(double) * N * C);
    if (dw) memset(dw, 0, sizeof(double) * V * C);
    for (int n = 0; n < N; n++) {
        double max = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++) {
            p[v] = 0;
            for (int i = 0; i < C; i++) p[v] += x[n * C + i] * w[v * C + i];
            if (p[v] > max) max = p[v];
        }
        for (int v = 0; v < V; v++) sum += exp(p[v] - max);
        losses[n] = max + log(sum) - p[targets[n]];
        for (int v = 0; v < V && (dx || dw); v++) {
            double d = scale * (exp(p[v] - max) / sum - (v == targets[n]));
            for (int i = 0; i < C; i++) {
                if (dx) dx[n * C + i] += d * w[v * C + i];
                if (dw) dw[v * C + i] += d * x[n * C + i];
            }
        }
    }
    free(p);
}

static inline void reference_adamw(double *p, double *m, double *v, const double *g, size_t n,
                                   double beta1, double beta2, double eps, int step, double rate,
                                   double decay, double gradient_scale) {
    for (size_t i = 0; i < n; i++) {
        double d = g[i] * gradient_scale;
        m[i] = beta1 * m[i] + (1 - beta1) * d;
        v[i] = beta2 * v[i] + (1 - beta2) * d * d;
        p[i] -= rate * decay * p[i];
        p[i] -=
            rate * (m[i] / (1 - pow(beta1, step))) / (sqrt(v[i] / (1 - pow(beta2, step))) + eps);
    }
}

/* out (S, S) = x x^T, or x^T x of a tall x (R, C), S being the smaller side. */
static inline void reference_gram(double *out, const double *x, size_t R, size_t C) {
    const size_t S = R < C ? R : C, L = R < C ? C : R;
    for (size_t i = 0; i < S; i++)
        for (size_t j = 0; j < S; j++) {
            double sum = 0;
            for (size_t k = 0; k < L; k++)
                sum += R <= C ? x[i * C + k] * x[j * C + k] : x[k * C + i] * x[k * C + j];
            out[i * S + j] = sum;
        }
}

/* x (R, C) = 3.4445 x + (-4.7750 A + 2.0315 A A) x with A = x x^T, five times, from x over its norm. */
static inline void reference_orthogonal(double *x, size_t R, size_t C) {
    const size_t S = R < C ? R : C;
    double *a = calloc(S * S, sizeof *a), *b = calloc(S * S, sizeof *b);
    double *y = calloc(R * C, sizeof *y), squares = 0;
    for (size_t i = 0; i < R * C; i++) squares += x[i] * x[i];
    for (size_t i = 0; i < R * C; i++) x[i] /= sqrt(squares) + 1e-7;
    for (int step = 0; step < 5; step++) {
        reference_gram(a, x, R, C);
        for (size_t i = 0; i < S; i++)
            for (size_t j = 0; j < S; j++) {
                double sum = 0;
                for (size_t k = 0; k < S; k++) sum += a[i * S + k] * a[k * S + j];
                b[i * S + j] = 2.0315 * sum - 4.7750 * a[i * S + j];
            }
        for (size_t i = 0; i < R; i++)
            for (size_t j = 0; j < C; j++) {
                double sum = 0;
                for (size_t k = 0; k < S; k++)
                    sum += R <= C ? b[i * S + k] * x[k * C + j] : x[i * C + k] * b[k * S + j];
                y[i * C + j] = 3.4445 * x[i * C + j] + sum;
            }
        memcpy(x, y, R * C * sizeof *x);
    }
    free(a), free(b), free(y);
}

static inline void reference_muon(double *p, double *m, const double *g, size_t R, size_t C,
                                  double momentum, double rate, double decay,
                                  double gradient_scale) {
    double *x = calloc(R * C, sizeof *x);
    for (size_t i = 0; i < R * C; i++) {
        const double d = g[i] * gradient_scale;
        m[i] = momentum * m[i] + (1 - momentum) * d;
        x[i] = momentum * m[i] + (1 - momentum) * d;
    }
    reference_orthogonal(x, R, C);
    for (size_t i = 0; i < R * C; i++)
        p[i] -= rate * (decay * p[i] + 0.2 * sqrt((double)(R > C ? R : C)) * x[i]);
    free(x);
}

#endif
