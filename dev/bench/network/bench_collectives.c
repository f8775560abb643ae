/* bench_collectives.c — a baseline to compare with: MPI_Reduce_scatter and MPI_Allgather, or, with
 * `allreduce`, MPI_Allreduce.
 *
 *     mpirun -np 4 bench_collectives MIB ROUNDS SECONDS [allreduce]
 *
 * Each round averages MIB of float32 and hands the result to all ranks. Prints {"ms": T} for each
 * of at most ROUNDS rounds after one that warms up, and stops after SECONDS.
 */
#include "dev/bench/network/bench_time.h"

#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    int rank, ranks, failed = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const bool at_once = argc == 5 && strcmp(argv[4], "allreduce") == 0;
    if (argc != 4 && !at_once) {
        fprintf(stderr, "usage: bench_collectives MIB ROUNDS SECONDS [allreduce]\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    const int rounds = atoi(argv[2]), share = (atoi(argv[1]) << 18) / ranks, count = share * ranks;
    const double seconds = atof(argv[3]), opened = bench_now();
    float *gradient = malloc((size_t)count * sizeof *gradient);
    float *average = malloc((size_t)share * sizeof *average);
    float *params = malloc((size_t)count * sizeof *params);
    int *shares = malloc((size_t)ranks * sizeof *shares);
    if (!gradient || !average || !params || !shares) MPI_Abort(MPI_COMM_WORLD, 1);
    for (int i = 0; i < count; i++) gradient[i] = (float)(rank + i % 7);
    for (int i = 0; i < ranks; i++) shares[i] = share;

    for (int round = -1; round < rounds; round++) {
        const double begun = bench_start();
        if (at_once) {
            MPI_Allreduce(gradient, params, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        } else {
            MPI_Reduce_scatter(gradient, average, shares, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            MPI_Allgather(average, share, MPI_FLOAT, params, share, MPI_FLOAT, MPI_COMM_WORLD);
        }
        if (round < 0) {
            MPI_Barrier(MPI_COMM_WORLD);
            continue;
        }
        if (!bench_stop(begun, opened, seconds)) break;
    }

    for (int i = 0; i < count; i++) {
        failed |= params[i] != (float)(ranks * (ranks - 1) / 2 + ranks * (i % 7));
    }
    if (failed) fprintf(stderr, "bench_collectives: rank %d: wrong sums\n", rank);
    free(shares);
    free(params);
    free(average);
    free(gradient);
    MPI_Finalize();
    return failed;
}
