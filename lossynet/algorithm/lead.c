/* lead.c — how far ahead of the model owners broadcast, so that replicas do not lag behind it.
 *
 * A worker that misses a packet keeps an older value. So replicas are behind the model, by the mean
 * age of p/(1-p) steps on average over packets. Their gradients belong to a point that the model
 * has left. Owners remove this lag on average: an owner sends x_t + l D_t, where D_t = x_t -
 * x_(t-1) is its last change and l is the lead. A replica of age A then holds
 *
 *     r = x_(t-A) + l D_(t-A),     r - x_t = l D_(t-A) - sum_(j=0..A-1) D_(t-j)
 *
 * With P(A = k), over packets that the worker does not own, the mean replica is at
 *
 *     E r - x_t = sum_k l P(A = k) D_(t-k) - sum_j P(A > j) D_(t-j)
 *
 * Independent losses. P(A = k) = (1-p) p^k and P(A > j) = p^(j+1). With l = p/(1-p), the mean age,
 * the two sums cancel term by term for any changes. The mean replica is then the model.
 *
 * Other losses. No l cancels every term. But the projection on the last change, E(r - x_t) D_t /
 * D_t^2, needs only the correlations rho_k of changes k steps apart. It is 0 for
 *
 *     l = sum_j P(A > j) rho_j / sum_k P(A = k) rho_k                                           (1)
 *
 * For independent losses this is p/(1-p) again. The distribution of ages and the correlations are
 * measured. So (1) holds for bursts, outages, traces and links that lose unequally (on average over
 * links). Without a drift sample there are no correlations; then rho = 1 and l is the mean age.
 *
 * Carried gradients (error_feedback.c) are late as well. Let D be the weighted mean age of the
 * gradients in an average. Let f be the share of an average that other workers than the owner
 * computed; only these workers use values that the owner sent. Adding D/f to the lead of (1) makes
 * workers compute gradients as far ahead of the model as these gradients will be late. To first
 * order, the mean point at which gradients are computed is then again the model. D and f are
 * measured from the losses. If N is large and losses are independent, D is p/(1-p) and the lead is
 * 2p/(1-p).
 *
 * An owner is exact on its own shard. So the lag of the mean over all N workers, and the effect of
 * the lead on it, are (N-1)/N of the above; l does not depend on N.
 *
 * In all sums old steps count exponentially less, so that the lead follows a network that changes.
 * A single step of a small model has too few packets to measure an age within a few percent.
 */
#include "lossynet/algorithm/calls.h"

#include <math.h>

static const double FORGET = 0.98; /* factor per step: a memory of about 50 steps */
static const double MOST = 16;     /* largest lead, in steps: the longest measured correlation */

void lossynet_broadcast_ahead(struct lossynet_comm *comm, const float *const *ahead, double lead) {
    COMM_DEMAND(comm, !ahead || (ln_are_vectors(comm, ahead) && isfinite(lead)),
                "lead %g: expected a number, and memory for each worker of this rank", lead);
    comm->lead.ahead = ahead;
    comm->lead.used = ahead ? lead : 0;
}

void ln_lead_add(struct lossynet_comm *comm, const struct ln_ages *ages, const double *covariance) {
    struct ln_lead_sums *sums = &comm->lead.sums;
    sums->packets = FORGET * sums->packets + (double)ages->packets;
    sums->age = FORGET * sums->age + (double)ages->sum;
    sums->late.late = FORGET * sums->late.late + ages->late.late;
    sums->late.others = FORGET * sums->late.others + ages->late.others;
    for (int k = 0; k <= LOSSYNET_RING; k++)
        sums->aged[k] = FORGET * sums->aged[k] + (double)ages->aged[k];
    for (int k = 0; covariance && k < LOSSYNET_RING; k++)
        sums->covariance[k] = FORGET * sums->covariance[k] + covariance[k];
}

/* How far replicas are behind the model, in steps: equation (1). */
static double replicas_behind(const struct ln_lead_sums *sums) {
    double behind = 0, fresh = 0, older = sums->packets;
    if (!(sums->covariance[0] > 0)) return sums->age / sums->packets;
    for (int k = 0; k < LOSSYNET_RING; k++) {
        const double rho = sums->covariance[k] / sums->covariance[0];
        older -= sums->aged[k];
        behind += older * rho;
        fresh += sums->aged[k] * rho;
    }
    return fresh > 0 ? fmax(0, behind / fresh) : MOST;
}

double lossynet_lead(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    const struct ln_lead_sums *sums = &comm->lead.sums;
    if (!(sums->packets > 0)) return 0;
    const double late = sums->late.others > 0 ? sums->late.late / sums->late.others : 0;
    return fmin(MOST, replicas_behind(sums) + late);
}
