/* test_lossynet_mpi.c — tests that bits do not depend on how the workers are spread over MPI ranks.
 *
 * It runs a scenario of 8 workers (test_lossynet.h) with several loss models and estimators. Rank 0
 * prints one line per case:
 *
 *     bernoulli mean 0.2 3f0c...
 *
 * The lines of these commands must be the same:
 *     build/test/test_lossynet_mpi
 *     mpirun -np 1 build/test/test_lossynet_mpi      (also 2, 4, 8)
 *
 * Exit code 0: the scenario ran; 1: it failed; 77: started by mpirun, but built without MPI.
 */
#include "test/lossynet/test_lossynet.h"

static const struct {
    const char *model;
    double rate;
    lossynet_estimator estimator;
    lossynet_wire_dtype wire_dtype;
} cases[] = {
    {"bernoulli", 0, LOSSYNET_MEAN, 0},   {"bernoulli", 0.2, LOSSYNET_MEAN, 0},
    {"bernoulli", 0.2, LOSSYNET_ZERO, 0}, {"bernoulli", 0.9, LOSSYNET_BALANCED, 0},
    {"bernoulli", 1, LOSSYNET_ZERO, 0},   {"burst:5", 0.3, LOSSYNET_BALANCED, 0},
    {"burst:300", 0.3, LOSSYNET_ZERO, 0}, {"trace", 0.5, LOSSYNET_MEAN, 0},
    {"bernoulli", 0.2, LOSSYNET_MEAN, 1}, {"burst:5", 0.3, LOSSYNET_BALANCED, 1},
    {"outage:4", 0.3, LOSSYNET_ZERO, 0},  {"bernoulli", 0.2, LOSSYNET_MEAN, 2},
    {"bernoulli", 0.2, LOSSYNET_MEAN, 3},
};

static bool write_trace(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return false;
    fprintf(file, "# every third, and a run\n0 0 1\n0001111\n");
    return fclose(file) == 0;
}

int main(int argc, char **argv) {
    struct lossynet_world world;
#ifndef LOSSYNET_MPI
    if (getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_RANK")) {
        printf("skipped: built without MPI\n");
        return 77;
    }
#endif
    if (lossynet_bootstrap(&argc, &argv, &world)) return 1;
    char trace[128], model[160];
    snprintf(trace, sizeof trace, "/tmp/test_lossynet_mpi.%ld.%d", (long)getpid(), world.rank);
    int failed = !write_trace(trace);
    for (size_t i = 0; i < sizeof cases / sizeof *cases && !failed; i++) {
        snprintf(model, sizeof model, "%s%s%s", cases[i].model,
                 strcmp(cases[i].model, "trace") ? "" : ":",
                 strcmp(cases[i].model, "trace") ? "" : trace);
        struct lossynet_settings settings =
            scenario_settings(model, cases[i].rate, cases[i].estimator);
        settings.link = LOSSYNET_LINK_MPI;
        settings.wire_dtype = cases[i].wire_dtype;
        struct lossynet_comm *comm;
        if (lossynet_open(&world, &settings, &comm)) {
            failed = 1;
            break;
        }
        uint64_t digest = scenario_run(comm, world.rank, SCENARIO_WORKERS / world.ranks);
        if (world.rank == 0)
            printf("%s %s %g %s %016llx\n", cases[i].model,
                   lossynet_estimator_name(cases[i].estimator), cases[i].rate,
                   cases[i].wire_dtype ? lossynet_wire_dtype_name(cases[i].wire_dtype) : "",
                   (unsigned long long)digest);
        failed = digest == 0;
        lossynet_close(comm);
    }
    remove(trace);
    lossynet_shutdown(failed);
    return failed;
}
