/* views.c — see views.h. */
#include "llmc/comm/views.h"

#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llmc/checkpoint/earlier_run.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/comm/common_facts.h"
#include "llmc/comm/handover.h"
#include "llmc/log/error.h"
#include "llmc/membership/membership.h"
#include "llmc/util/stop_signal.h"

/* How long rank 0 waits for the other ranks, which all know the view by then: for ROOT_TIMEOUTS peer
 * time-outs, in one of which they notice that the last view is over, but within these seconds. TCP
 * sends a lost first packet again after 1 s (RFC 6298). The others wait for rank 0 for longer. What
 * ranks tell each other afterwards may take longer, since they allocate memory in between. */
static const double ROOT_TIMEOUTS = 1.5, ROOT_LEAST = 1.5, ROOT_MOST = 3;
static const double OTHERS_TIMES = 2, OTHERS_MOST = 5;
/* At most so many views in a row may fail before they train anything. */
enum { FAILURES_MOST = 50 };
/* A rank that was asked to stop does so together with the others, if they train so soon. */
static const double STOP_SECONDS = 10;

struct views {
    struct options *options;
    const char *resume; /* --resume, if the run may begin with this process; else NULL */
    struct membership *membership;
    int listener; /* -1: none */
    int local;    /* workers on each rank */
    struct lossynet_world world;
    lossynet_share share; /* the world's original function; `watched_share` calls it */
    void *share_context;
    bool share_failed;
    int64_t epoch;         /* of the present view; 0: there is none */
    int64_t first;         /* of the first view that this process has entered; 0: none */
    int64_t start;         /* the run's first view, if this process was in it; else 0 */
    bool waits, told;      /* no rank of the view has the run's state; a line was printed */
    bool failed;           /* the last view ended because a rank was not heard */
    bool complete;         /* other ranks have ended the run */
    bool entered;          /* training has begun in this view: this rank has the run's state */
    int failures;          /* views in a row that were not entered */
    struct handover state; /* of the last view that was entered */
    struct handover_report report;
    double since;                /* when the last view ended, s */
    double stands;               /* since when nothing is trained, s */
    bool *ends;                  /* [ranks]: a rank wants the view to end after this step */
    bool *missing;               /* [ranks]: which ranks were not heard when the view ended */
    char left[512], joined[512]; /* lists of ranks for people to read */
};

int views_check(const struct options *o, int ranks) {
    if (!o->meet) {
        if (o->meet_anew || o->meet_ranks > 1 || o->meet_keep || o->meet_process >= 0)
            return log_error("--meet-%s: expected --meet URL too, the place where ranks find each "
                             "other",
                             o->meet_anew           ? "anew"
                             : o->meet_keep         ? "keep"
                             : o->meet_process >= 0 ? "process"
                                                    : "ranks");
        return 0;
    }
    if (ranks > 1 && !o->preflight && !o->dry_run)
        return log_error("--meet: expected processes that are started one by one, as by "
                         "scripts/elastic.sh: under mpirun all ranks end when one dies");
    if (o->eval || o->generate)
        return log_error("--meet: expected training, --dry-run or --preflight");
    if (o->algorithm != ALGORITHM_LOSSY)
        return log_error("--meet: expected --algorithm lossy, got %s: only there a lost rank is "
                         "nothing but lost packets",
                         algorithm_names[o->algorithm]);
    if (o->net.link == LOSSYNET_LINK_MPI)
        return log_error("--meet: expected --link udp or verbs, got mpi");
    if (o->data_split == DATA_CONTIGUOUS)
        return log_error("--meet: expected --data-split shared, which any number of workers can "
                         "deal out");
    if (o->net.record_loss) return log_error("--meet: expected no --record-loss");
    if (o->net.workers % o->meet_ranks)
        return log_error("--workers: expected a multiple of the %d ranks of --meet-ranks, got %d",
                         o->meet_ranks, o->net.workers);
    struct membership_url url;
    return membership_url_parse(o->meet, &url);
}

/* ---- meeting ---------------------------------------------------------------------------- */

/* A lossynet_share that remembers whether it failed, which another rank has caused. */
static lossynet_status watched_share(void *context, const struct lossynet_world *world, void *all,
                                     size_t bytes) {
    struct views *v = context;
    struct lossynet_world own = *world;
    own.share = v->share;
    own.share_context = v->share_context;
    lossynet_status status = v->share(v->share_context, &own, all, bytes);
    v->share_failed |= status != LOSSYNET_OK;
    const int lost = status ? lossynet_rendezvous_lost(&own) : -1;
    if (lost >= 0) v->missing[lost] = true;
    return status;
}

static void close_world(struct views *v) {
    if (!v->share) return;
    v->world.share = v->share;
    v->world.share_context = v->share_context;
    lossynet_rendezvous_close(&v->world);
    v->share = NULL;
}

/* Adds "rank R host:pid" to a list for people to read. rank: in the view that has the member. */
static void name_member(char *list, size_t room, int rank, const struct member *m) {
    const size_t used = strlen(list);
    if (used + 1 < room)
        snprintf(list + used, room - used, "%srank %d %s:%d", used ? ", " : "", rank, m->host,
                 m->pid);
}

static void find_ended(void *context, bool *ended) {
    membership_find_ended(context, ended);
}

/* Whether this rank stops alone. Views may fail again and again, and it does not wait for one that
 * trains. */
static bool stops_alone(const struct views *v) {
    if (!stop_signal_seen() || log_seconds() < v->stands + STOP_SECONDS) return false;
    log_error("was asked to stop, and no view has trained for %g s", STOP_SECONDS);
    return true;
}

static double meeting_seconds(const struct options *o, bool root) {
    const double seconds = fmin(fmax(ROOT_TIMEOUTS * o->net.peer_timeout, ROOT_LEAST), ROOT_MOST);
    return root ? seconds : fmin(OTHERS_TIMES * seconds, OTHERS_MOST);
}

/* Meets the ranks of the membership's present view, or of a later view if some ranks do not
 * come. */
static int meet(struct views *v) {
    for (;;) {
        const struct view *view = membership_view(v->membership);
        const int ranks = view->members;
        const bool root = view->self == 0;
        bool *missing = calloc((size_t)ranks, sizeof *missing);
        if (!missing) return log_out_of_memory("the list of ranks", 0);
        const struct lossynet_meeting meeting = {.address = view->member[0].address,
                                                 .listener = v->listener,
                                                 .epoch = (uint64_t)view->epoch,
                                                 .rank = view->self,
                                                 .ranks = ranks,
                                                 .seconds = meeting_seconds(v->options, root),
                                                 .exchange_seconds = root ? ROOT_MOST : OTHERS_MOST,
                                                 .missing = missing,
                                                 .find_ended = find_ended,
                                                 .context = v->membership,
                                                 .key_file = v->options->net.key_file};
        v->epoch = view->epoch;
        v->entered = v->share_failed = false;
        log_rank = ranks > 1 ? view->self : -1;
        int failed = lossynet_rendezvous_meet(&meeting, &v->world) != LOSSYNET_OK;
        int next = !failed          ? 0
                   : stops_alone(v) ? -1
                                    : membership_next_view(v->membership, missing, false);
        free(missing);
        if (next) return v->complete = next > 0, -1;
        if (!failed) break;
    }
    v->share = v->world.share;
    v->share_context = v->world.share_context;
    if (v->share) {
        v->world.share = watched_share;
        v->world.share_context = v;
    }
    const size_t ranks = (size_t)v->world.ranks;
    free(v->ends);
    free(v->missing);
    v->ends = calloc(ranks, sizeof *v->ends);
    v->missing = calloc(ranks, sizeof *v->missing);
    return v->ends && v->missing ? 0 : log_out_of_memory("the list of ranks", (double)ranks);
}

/* Lists the members of `was` that are not in `is`. */
static void name_absent(char *list, size_t room, const struct view *was, const struct view *is) {
    list[0] = '\0';
    for (int r = 0; r < was->members; r++)
        if (view_rank_of(is, was->member[r].uid) < 0) name_member(list, room, r, &was->member[r]);
}

/* ---- open and close --------------------------------------------------------------------- */

/* Listens at this address alone, for a rendezvous in any view. */
static int listen_at(void *context, const char *address) {
    struct views *v = context;
    const bool bare = strchr(address, ':') != NULL; /* IPv6 */
    char here[96];
    int port;
    snprintf(here, sizeof here, "%s%s%s:0", bare ? "[" : "", address, bare ? "]" : "");
    struct lossynet_settings s = {0};
    lossynet_options_apply(&v->options->net, 1, &s);
    return lossynet_rendezvous_listen(here, s.network.ports, &v->listener, &port) ? -1 : port;
}

static int prove(void *context, const char *text, char proof[65]) {
    const struct views *v = context;
    return lossynet_key_proof(v->options->net.key_file, text, proof) ? -1 : 0;
}

static int join(struct views *v, const char *revision) {
    const struct options *o = v->options;
    struct membership_url url;
    json_t *same = membership_url_parse(o->meet, &url) ? NULL : common_facts_json(o, url.run);
    if (!same) return 1;
    const struct membership_settings settings = {.url = o->meet,
                                                 .first_ranks = o->meet_ranks,
                                                 .version = revision,
                                                 .options = same,
                                                 .anew = o->meet_anew,
                                                 .process = o->meet_process,
                                                 .listen = listen_at,
                                                 .prove = o->net.key_file ? prove : NULL,
                                                 .context = v};
    const int status = membership_open(&settings, &v->membership);
    json_decref(same);
    if (status == 1) {
        if (!o->quiet) printf("the run at %s is complete\n", o->meet);
        return VIEWS_COMPLETE;
    }
    return status ? 1 : 0;
}

/* Whether no member of the view was in a view before. */
static bool is_first(const struct view *v) {
    for (int r = 0; r < v->members; r++)
        if (v->member[r].joined < v->epoch) return false;
    return true;
}

/* Before a first view: this run cannot have written any files yet. Returns 0, or the exit code after
 * reporting. */
static int check_earlier_run(const struct options *o, bool tells) {
    log_muted = !tells;
    const int status = earlier_run_check(o) ? 2 : 0; /* another start would fail in the same way */
    log_muted = false;
    return status;
}

int views_open(struct options *o, const char *revision, struct views **out) {
    *out = NULL;
    if (!o->meet || o->dry_run || o->preflight) return 0;
    struct views *v = *out = calloc(1, sizeof *v);
    if (!v) return log_out_of_memory("the view", 0), 1;
    v->options = o;
    v->listener = -1;
    v->local = o->net.workers ? o->net.workers / o->meet_ranks : 1;
    int status = join(v, revision);
    if (status) return status;
    if (is_first(membership_view(v->membership))) {
        v->start = membership_view(v->membership)->epoch;
        v->resume = o->resume;
        status = check_earlier_run(o, membership_view(v->membership)->self == 0);
    }
    o->resume = NULL; /* until views_begin; or others have the state, and checkpoints come and go */
    if (status) return status;
    v->since = v->stands = log_seconds();
    return meet(v) ? v->complete ? VIEWS_COMPLETE : 1 : 0;
}

void views_close(struct views *v, enum views_end end) {
    if (!v) return;
    if (end == VIEWS_RUN_COMPLETE) membership_complete(v->membership);
    if (end == VIEWS_RUN_STOPS && !v->complete) membership_dissolve(v->membership);
    close_world(v);
    if (v->listener >= 0) close(v->listener); /* first: from now on others see that it has ended */
    membership_close(v->membership);
    handover_release(&v->state);
    free(v->ends);
    free(v->missing);
    free(v);
}

struct lossynet_world views_world(const struct views *v) {
    return v->world;
}

int views_workers(const struct views *v) {
    return v->world.ranks * v->local;
}

bool views_are_complete(const struct views *v) {
    return v && v->complete;
}

bool views_is_first_start(const struct views *v) {
    return !v || !v->first || v->epoch == v->first;
}

/* ---- in a view -------------------------------------------------------------------------- */

int views_begin(struct views *v) {
    struct {
        int32_t failed;
        char newest[RESUME_NAME_BYTES];
    } start = {0};
    if (!v) return 0;
    struct options *o = v->options;
    const bool begins = v->resume && !v->first;
    if (begins) o->resume = v->resume, o->model = o->model_given;
    if (begins && v->world.rank == 0) start.failed = resume_newest(o, start.newest);
    if (common_answer(&v->world, &start, sizeof start) || start.failed) return -1;
    return begins && resume_choose(o, start.newest) ? -1 : 0;
}

/* Whether nobody in a view has the run's state, although the run has begun: all who had it are gone.
 * Then these ranks do not begin anew, but stay until one that has the state joins them again. */
static bool lacks_state(struct views *v) {
    const struct view *view = membership_view(v->membership);
    v->waits = view->member[view->self].joined != v->start;
    if (!v->waits) return false; /* no view of the run has been entered yet */
    if (view->self == 0 && !v->told)
        log_error("no rank of view %lld has the state of run %s: waits for one that has; if all of "
                  "them are gone, stop this process and start the run with --meet-anew",
                  (long long)view->epoch, v->options->meet);
    v->told = true;
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    return true;
}

int views_enter(struct views *v, struct data_parallel *d, struct resume_point *at,
                struct step_metrics last[HANDOVER_STEPS], bool *continues) {
    *continues = false;
    if (!v) return 0;
    struct handover_place place;
    place.at = *at;
    memcpy(place.last, last, sizeof place.last);
    if (handover_give(&v->state, d, &place, &v->report)) return -1;
    if (!v->report.survivors && lacks_state(v)) return -1;
    *at = place.at;
    memcpy(last, place.last, sizeof place.last);
    *continues = v->report.survivors > 0;
    return 0;
}

void views_report(struct views *v, struct progress *progress, struct jsonl *log, int step,
                  const struct step_metrics last[HANDOVER_STEPS]) {
    if (!v) return;
    for (int s = jsonl_last_step(log) + 1; s < step; s++)
        if (last[s % HANDOVER_STEPS].tokens > 0 && last[s % HANDOVER_STEPS].step == s)
            metrics_log_step(log, &last[s % HANDOVER_STEPS]);
    v->entered = true;
    v->told = false;
    handover_release(&v->state); /* the state of this rank is in its comm now */
    if (!v->first) v->first = v->epoch;
    v->failures = 0;
    const struct handover_report *r = &v->report;
    const double seconds = log_seconds() - v->since;
    char line[1400], adopted[128] = "";
    if (r->adopted)
        snprintf(adopted, sizeof adopted, "; parameters adopted, %.1f steps old (at most %d)",
                 r->mean_age, r->max_age);
    snprintf(line, sizeof line, "%6d  view %lld: %d ranks%s%s%s%s%s, %.2f s", step,
             (long long)v->epoch, v->world.ranks, *v->left ? "; gone: " : "", v->left,
             *v->joined ? "; new: " : "", v->joined, adopted, seconds);
    if (v->epoch > 1 && v->world.rank == 0) progress_message(progress, line);
    const int workers = views_workers(v);
    const int64_t sequences = options_micro_batches(v->options, workers) * v->options->batch;
    jsonl_write(log, json_pack("{s:s, s:i, s:I, s:i, s:i, s:I, s:s, s:s, s:I, s:o, s:o, s:o}",
                               "event", "view", "step", step, "view", (json_int_t)v->epoch, "ranks",
                               v->world.ranks, "workers", workers, "sequences",
                               (json_int_t)sequences, "left", v->left, "joined", v->joined,
                               "adopted_packets", (json_int_t)r->adopted, "adopted_mean_age",
                               jsonl_number(r->mean_age), "adopted_max_age",
                               jsonl_number(r->max_age), "seconds", jsonl_number(seconds)));
}

int views_tell(struct views *v, struct data_parallel *d) {
    if (!v) return 0;
    const bool wants = membership_has_changed(v->membership);
    return lossynet_rank_gather(d->comm, &wants, v->ends, sizeof wants, true) ? -1 : 0;
}

bool views_end_here(const struct views *v) {
    for (int r = 0; v && r < v->world.ranks; r++)
        if (v->ends[r]) return true;
    return false;
}

/* ---- from one view to the next ---------------------------------------------------------- */

/* If a view in which processes join could not be opened, the ranks that were there before go on
 * without those: what these ranks have in common worked in the view before. */
static bool drop_joiners(struct views *v) {
    const struct view *view = membership_view(v->membership);
    char list[512] = "";
    if (v->entered || is_first(view)) return false;
    for (int r = 0; r < view->members; r++) {
        v->missing[r] = view->member[r].joined == view->epoch;
        if (v->missing[r]) name_member(list, sizeof list, r, &view->member[r]);
    }
    if (!*list) return false;
    if (v->missing[view->self]) {
        log_error("the ranks of run %s go on without this process, with which they could not open "
                  "view %lld (see above)",
                  v->options->meet, (long long)view->epoch);
        return false;
    }
    if (view->self == 0)
        log_error("view %lld could not be opened with %s (see above): goes on without",
                  (long long)view->epoch, list);
    return true;
}

int views_leave(struct views *v, const struct data_parallel *d, bool agreed) {
    if (!v) return -1;
    bool *missing = v->missing;
    v->failed = v->share_failed || (d->comm && lossynet_has_failed(d->comm, missing));
    if (!v->failed && !agreed && !v->waits) v->failed = drop_joiners(v);
    if (!v->failed && !agreed && !v->waits) return -1;
    if (!v->entered && !v->waits && ++v->failures > FAILURES_MOST)
        return log_error(
            "%d views in a row have failed before anything was trained: expected ranks "
            "that reach each other",
            FAILURES_MOST);
    if (!v->entered && stops_alone(v)) return -1;
    v->since = log_seconds();
    if (v->entered) v->stands = v->since;
    return v->entered ? handover_take(d, v->epoch, &v->state) : 0;
}

int views_next(struct views *v) {
    struct view was;
    close_world(v);
    /* The next view takes arrays of other sizes. What the last one has freed would stay resident
     * between them. */
    malloc_trim(0);
    if (view_copy(membership_view(v->membership), &was)) return -1;
    int failed =
        membership_next_view(v->membership, v->failed ? v->missing : NULL, v->entered || v->waits);
    v->waits = false;
    v->complete = failed > 0;
    if (!failed) failed = meet(v);
    if (!failed) {
        const struct view *is = membership_view(v->membership);
        name_absent(v->left, sizeof v->left, &was, is);
        name_absent(v->joined, sizeof v->joined, is, &was);
    }
    view_clear(&was);
    return failed ? -1 : 0;
}
