/* ptx_emu.h — the instructions of llmc/backend/cuda/ptx.cuh, as the PTX ISA (8.x) defines them.
 * Included by ptx.cuh under emulation. Memory is read and written here and not in cuda_emu.cpp, so
 * that the sanitizers see it. */
#ifndef CUDA_EMU_PTX_H
#define CUDA_EMU_PTX_H

namespace cuda_emu {
void finish_ldmatrix(struct group *g);
void finish_ldmatrix_trans(struct group *g);
void finish_mma(struct group *g);
void copy_issue(void *destination, const void *source, bool valid);
void copy_commit(void);
bool copy_next(int pending, struct copy *next);

/* "Warp-level matrix load": lane l passes the address of row l % 8 of matrix l / 8 and receives two
 * neighbouring elements of each matrix, or, if transposed, two elements of one column. */
template <bool transposed> static inline void ldmatrix(uint32_t r[4], const void *row) {
    if ((uintptr_t)row % 16) fail("ldmatrix: the row's address is not a multiple of 16");
    if (!is_shared(row)) fail("ldmatrix: the row is not in shared memory");
    uint32_t address[2], out[16];
    memcpy(address, &row, 8);
    meet(0xffffffffu, LDMATRIX, address, 2, transposed ? finish_ldmatrix_trans : finish_ldmatrix,
         -1, out, 16, "ldmatrix");
    int lane = current->lane, column = transposed ? lane / 4 : lane % 4 * 2;
    for (int m = 0; m < 4; m++) {
        const uint16_t *rows[2];
        memcpy(rows, out + 4 * m, 16);
        r[m] = rows[0][column] | (uint32_t)rows[1][transposed ? column : column + 1] << 16;
    }
}
} // namespace cuda_emu

static inline void ldmatrix_x4(uint32_t r[4], const void *row) {
    cuda_emu::ldmatrix<false>(r, row);
}

static inline void ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    cuda_emu::ldmatrix<true>(r, row);
}

static inline void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2],
                                const float c[4]) {
    uint32_t in[10];
    memcpy(in, a, 16);
    memcpy(in + 4, b, 8);
    memcpy(in + 6, c, 16);
    cuda_emu::meet(0xffffffffu, cuda_emu::MMA, in, 10, cuda_emu::finish_mma, -1, in, 4, "mma");
    memcpy(d, in, 16);
}

/* The destination is NaN until the wait that covers the copy, and the source is read only then. So
 * a kernel that reads the destination or changes the source too early gets wrong numbers. */
static inline void cp_async16(void *destination, const void *source, bool valid) {
    cuda_emu::copy_issue(destination, source, valid);
    for (int i = 0; i < 4; i++) ((volatile uint32_t *)destination)[i] = 0xffffffffu;
}

static inline void cp_async_commit(void) {
    cuda_emu::copy_commit();
}

template <int pending> static inline void cp_async_wait(void) {
    struct cuda_emu::copy c;
    while (cuda_emu::copy_next(pending, &c))
        for (int i = 0; i < 4; i++)
            ((volatile uint32_t *)c.destination)[i] =
                c.source ? ((const volatile uint32_t *)c.source)[i] : 0;
}

/* Exact, except that it flushes to zero what the instruction does. */
static inline float exp2_approx(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}

#endif
