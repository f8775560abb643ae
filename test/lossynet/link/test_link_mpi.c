/* test_link_mpi.c — tests that an error of MPI ends the call that needs it, with one line. MPI's
 * functions are stand-ins here, one of which fails.
 *
 * Exit code 77: built without MPI.
 */
#include "test/lossynet/test_lossynet.h"

#include <unistd.h>

#ifndef LOSSYNET_MPI
int main(void) {
    printf("skipped: built without MPI\n");
    return 77;
}
#else
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

static const char *broken; /* the function that fails */
static int lines;
static char line[512];

static int result(const char *function) {
    return strcmp(function, broken) ? MPI_SUCCESS : MPI_ERR_OTHER;
}

int MPI_Initialized(int *flag) {
    *flag = 1;
    return MPI_SUCCESS;
}

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm *out) {
    *out = comm;
    return MPI_SUCCESS;
}

int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler) {
    (void)comm, (void)handler;
    return MPI_SUCCESS;
}

int MPI_Comm_free(MPI_Comm *comm) {
    (void)comm;
    return MPI_SUCCESS;
}

int MPI_Error_string(int code, char *text, int *length) {
    *length = snprintf(text, MPI_MAX_ERROR_STRING, "error %d of the test", code);
    return MPI_SUCCESS;
}

int MPI_Isend(const void *bytes, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
    (void)bytes, (void)count, (void)type, (void)to, (void)tag, (void)comm, (void)request;
    return result("MPI_Isend");
}

int MPI_Testsome(int count, MPI_Request requests[], int *out, int indices[], MPI_Status *statuses) {
    (void)count, (void)requests, (void)indices, (void)statuses;
    *out = 0;
    return result("MPI_Testsome");
}

int MPI_Improbe(int from, int tag, MPI_Comm comm, int *there, MPI_Message *message,
                MPI_Status *status) {
    (void)from, (void)tag, (void)comm, (void)message, (void)status;
    *there = 0;
    return result("MPI_Improbe");
}

static lossynet_status exchange(void *context, const struct lossynet_world *world, void *all,
                                size_t bytes) {
    (void)context;
    for (int r = 1; r < world->ranks; r++) memcpy((char *)all + (size_t)r * bytes, all, bytes);
    return LOSSYNET_OK;
}

static void note(void *context, const char *message) {
    (void)context;
    lines++;
    snprintf(line, sizeof line, "%s", message);
}

static void check(const char *function) {
    const size_t elements = 100;
    const struct lossynet_world world = {.ranks = 2, .local_ranks = 2, .share = exchange};
    struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
    struct lossynet_comm *comm;
    char expected[80];
    int mine = 1, all[2];
    settings.log = note;
    broken = function;
    lines = 0;
    assert_int_equal(ln_comm_open(&world, &settings, ln_link_mpi_open, &comm), LOSSYNET_OK);
    assert_int_equal(lossynet_all_gather(comm, &mine, all, sizeof mine), LOSSYNET_LINK);
    assert_int_equal(lossynet_all_gather(comm, &mine, all, sizeof mine), LOSSYNET_LINK);
    lossynet_close(comm);
    assert_int_equal(lines, 1);
    snprintf(expected, sizeof expected, "%s: error %d of the test", function, MPI_ERR_OTHER);
    assert_non_null(strstr(line, expected));
}

static void test_an_error_ends_the_call(void **state) {
    (void)state;
    alarm(60); /* instead of waiting for ever */
    check("MPI_Isend");
    check("MPI_Testsome");
    check("MPI_Improbe");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_an_error_ends_the_call)};
    return cmocka_run_group_tests_name("link over MPI", tests, NULL, NULL);
}
#endif
