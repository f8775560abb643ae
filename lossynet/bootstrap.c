/* bootstrap.c — joins the job that a launcher started, and leaves it.
 *
 * MPI is initialized only if the environment shows a launcher. So a single rank starts faster,
 * needs no working MPI installation, and can be debugged and profiled like any other program.
 */
#include "lossynet/comm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef LOSSYNET_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#endif

/* Recognises Open MPI's mpirun, PMIx, PMI (MPICH, Intel), and srun with an MPI plug-in. */
static bool launcher_seen(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK",
                                        "PMI_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return true;
    const char *slurm = getenv("SLURM_MPI_TYPE");
    return getenv("SLURM_PROCID") && slurm && strcmp(slurm, "none") != 0;
}

#ifdef LOSSYNET_MPI

/* How long a rank that ends with an error waits for the others before it ends them. */
static const double MEET_SECONDS = 3;
/* A communicator for `meet` alone, so that MPI cannot match its barrier with another collective. */
static MPI_Comm leaving = MPI_COMM_NULL;

/* Open MPI sends small messages through shared memory at once, and first asks the receiver about
 * larger ones. With its own limit, 4,096 bytes, a datagram of the default size is a larger one. */
static void send_datagrams_at_once(void) {
    setenv("OMPI_MCA_btl_vader_eager_limit", "8192", 0);
    setenv("OMPI_MCA_btl_sm_eager_limit", "8192", 0); /* the name in Open MPI 5 */
}

static lossynet_status join(int *argc, char ***argv, struct lossynet_world *world) {
    send_datagrams_at_once();
    int provided, code = MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    if (code != MPI_SUCCESS)
        return ln_fail(LOSSYNET_LINK,
                       "MPI_Init_thread failed with code %d: expected a job that mpirun or srun "
                       "started",
                       code);
    if (provided < MPI_THREAD_FUNNELED)
        return ln_fail(
            LOSSYNET_LINK,
            "MPI offers thread level %d: expected MPI_THREAD_FUNNELED (%d), because ranks "
            "compute with threads",
            provided, MPI_THREAD_FUNNELED);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm host;
    if (MPI_Comm_rank(MPI_COMM_WORLD, &world->rank) ||
        MPI_Comm_size(MPI_COMM_WORLD, &world->ranks) ||
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host))
        goto failed;
    int wrong = MPI_Comm_rank(host, &world->local_rank) ||
                MPI_Comm_size(host, &world->local_ranks) || MPI_Comm_dup(MPI_COMM_WORLD, &leaving);
    MPI_Comm_free(&host);
    if (!wrong) return LOSSYNET_OK;
failed:
    return ln_fail(LOSSYNET_LINK, "MPI cannot tell this rank's place among the ranks");
}

static lossynet_status share_by_mpi(const struct lossynet_world *world, void *all, size_t bytes) {
    int started = 0;
    MPI_Initialized(&started);
    if (started && !MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, (int)bytes, MPI_BYTE,
                                  MPI_COMM_WORLD))
        return LOSSYNET_OK;
    return ln_fail(LOSSYNET_LINK,
                   "rank %d of %d: the ranks cannot meet: expected lossynet_bootstrap first, and a "
                   "working MPI",
                   world->rank, world->ranks);
}

/* Waits until every rank calls this. Returns false if one has not done so after `seconds`. */
static bool meet(double seconds) {
    const struct timespec pause = {0, 1000000};
    const double end = MPI_Wtime() + seconds;
    MPI_Request request;
    int together = 0;
    if (leaving == MPI_COMM_NULL || MPI_Ibarrier(leaving, &request)) return false;
    while (!MPI_Test(&request, &together, MPI_STATUS_IGNORE) && !together && MPI_Wtime() < end)
        nanosleep(&pause, NULL);
    return together;
}

/* MPI_Abort is the last resort: Open MPI then prints a page of text, and its mpirun sometimes
 * crashes. */
void lossynet_shutdown(int exit_code) {
    int started = 0, finished = 0;
    MPI_Initialized(&started);
    MPI_Finalized(&finished);
    if (!started || finished) return;
    fflush(NULL); /* mpirun ends all ranks as soon as one has exited with an error */
    if (!meet(exit_code ? MEET_SECONDS : INFINITY) && exit_code)
        MPI_Abort(MPI_COMM_WORLD, exit_code);
    else
        MPI_Finalize();
}

#else

static lossynet_status join(int *argc, char ***argv, struct lossynet_world *world) {
    (void)argc, (void)argv, (void)world;
    /* Several processes that each act as the only rank would overwrite each other's files. */
    const char *names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *size = getenv(names[i]);
        if (size && atoi(size) > 1)
            return ln_fail(
                LOSSYNET_LINK,
                "started with %s=%s, but built without MPI: install Open MPI (mpicc) and "
                "build again",
                names[i], size);
    }
    return LOSSYNET_OK;
}

static lossynet_status share_by_mpi(const struct lossynet_world *world, void *all, size_t bytes) {
    (void)all, (void)bytes;
    return ln_fail(LOSSYNET_LINK,
                   "%d ranks, but this program was built without MPI: install Open MPI (mpicc) and "
                   "build again",
                   world->ranks);
}

void lossynet_shutdown(int exit_code) {
    (void)exit_code;
}

#endif

lossynet_status lossynet_bootstrap(int *argc, char ***argv, struct lossynet_world *world) {
    LN_EXPECT(NULL, world, "expected memory for a world, got NULL");
    *world = (struct lossynet_world){.rank = 0, .ranks = 1, .local_rank = 0, .local_ranks = 1};
    return launcher_seen() ? join(argc, argv, world) : LOSSYNET_OK;
}

lossynet_status ln_bootstrap_share(void *context, const struct lossynet_world *world, void *all,
                                   size_t bytes) {
    (void)context;
    return world->ranks < 2 ? LOSSYNET_OK : share_by_mpi(world, all, bytes);
}

struct lossynet_world ln_bootstrap_world(const struct lossynet_world *world) {
    struct lossynet_world meeting = *world;
    if (!meeting.share) meeting.share = ln_bootstrap_share;
    return meeting;
}

lossynet_status lossynet_bootstrap_gather(const struct lossynet_world *world, void *all,
                                          size_t bytes) {
    LN_EXPECT(NULL, world && (all || !bytes), "expected a world, and memory, got NULL");
    const struct lossynet_world meeting = ln_bootstrap_world(world);
    return ln_share(&meeting, all, bytes);
}

const char *lossynet_version(void) {
    return LOSSYNET_VERSION;
}
