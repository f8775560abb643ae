/* param_layout.h — where each parameter of a Llama lies in the flat vector that workers exchange.
 *
 * All parameters of a replica lie in one vector, in the order in which backward finishes their
 * gradients: classifier, last norm, layers from last to first, embedding. A bucket is a part of it:
 *
 *     | lm_head | norm, layer L-1 | layer L-2 | ... | layer 0 | embedding |
 *       bucket 0  bucket 1                                      last bucket
 *
 * With a tied classifier there is no lm_head, and layer L-1 is bucket 0. Query, key and value
 * projections lie side by side and are one matrix product, and so are gate and up.
 *
 * By default each of N owners gets 1/N of each bucket. Muon needs whole matrices, which
 * param_layout_deal gives to owners (deal.c).
 */
#ifndef LLMC_MODEL_PARAM_LAYOUT_H
#define LLMC_MODEL_PARAM_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/model/tensors.h"
#include "llmc/model/config.h"
#include "llmc/model/ranges.h"

struct layer_offsets { /* offsets in elements from the start of the vector */
    size_t attention_norm /* (C) */, qkv /* ((H+2K)D, C) */, attention_out /* (C, HD) */;
    size_t mlp_norm /* (C) */, gate_up /* (2F, C) */, down /* (C, F) */;
};

struct span { /* one tensor of the vector */
    size_t offset, count;
    bool decay;     /* weight decay applies (matrices), or not (norms) */
    int rows, cols; /* of a layer's matrix; tables and norms: 0 */
};

struct param_layout {
    struct llama_config config;
    size_t count; /* P: all parameters */
    size_t embedding, final_norm, classifier /* == embedding when tied */;
    struct layer_offsets *layer; /* [L] */
    int spans;
    struct span *span; /* [spans], in ascending order, tiling the vector */
    int buckets;
    size_t *bucket_elements; /* [buckets] */
    size_t *shard_elements;  /* [buckets][N]: of each owner; NULL: equal shards */
};

/* Computes the layout of a checked config. The caller releases it. Returns 0, or -1 after
 * reporting. */
int param_layout_build(const struct llama_config *config, struct param_layout *layout);
void param_layout_release(struct param_layout *layout);

/* Deals the layers' matrices out to `workers` owners, for Muon: fills shard_elements. Each owner gets
 * whole matrices, or with many owners blocks of at least 512 of their rows. The same config and
 * number of workers give the same owners. Returns 0, or -1 after reporting. */
int param_layout_deal(struct param_layout *layout, int workers);

/* Adds to `out` the parts of ascending ranges whose elements have a second moment: of all tensors, but
 * with Muon (shard_elements) not of the layers' matrices. Returns 0, or -1 after reporting. */
int param_layout_squares(const struct param_layout *layout, const struct range *range,
                         size_t ranges, struct ranges *out);

/* With shard_elements: the elements of the owner that has most, and the second moments of the owner
 * that has most of those. */
size_t param_layout_largest_owner(const struct param_layout *layout, int workers, size_t *squares);
/* With shard_elements: the most elements of layers that an owner still has to get when backward has
 * finished, if it gets `per_layer` elements while a layer is computed; and as many delay forward. */
double param_layout_backlog(const struct param_layout *layout, int workers, double per_layer);

int param_layout_bucket_of_layer(const struct param_layout *layout, int layer);
size_t param_layout_bucket_offset(const struct param_layout *layout, int bucket);

/* The place of gradients. Either all gradients lie in a vector like the parameters', or there are
 * only the gradients of `slots` buckets: bucket b is in slot b % slots, and a slot has `slot`
 * elements. A table tied to the classifier has a place of its own after the slots, since backward
 * begins and ends with it. */
struct gradient_place {
    float *first;
    int slots; /* 0: all */
    size_t slot;
};

size_t param_layout_largest_bucket(const struct param_layout *layout); /* in elements */

/* The elements of one slot; and of all gradients if there are so many slots (0: a whole vector). */
size_t param_layout_gradient_slot(const struct param_layout *layout);
size_t param_layout_gradient_elements(const struct param_layout *layout, int slots);

/* Where the gradient of element `offset` of the vector lies: as an index from place->first, and as
 * an address. */
size_t param_layout_gradient_at(const struct param_layout *layout,
                                const struct gradient_place *place, size_t offset);
float *param_layout_gradient(const struct param_layout *layout, const struct gradient_place *place,
                             size_t offset);

/* Fills `tensors` like model_tensors(config), with data that points into a vector of `count`
 * floats. */
void param_layout_tensors(const struct param_layout *layout, float *vector,
                          struct named_tensor *tensors);

/* The same as a new list of *count tensors, which the caller frees. NULL after reporting. */
struct named_tensor *param_layout_tensor_list(const struct param_layout *layout, float *vector,
                                              size_t *count);

/* The name of the tensor that holds element `offset` of the vector. */
void param_layout_name(const struct param_layout *layout, size_t offset, char name[96]);

/* The same if only one bucket is in memory, in `elements`. The data of all other tensors is
 * NULL. */
struct named_tensor *param_layout_bucket_tensors(const struct param_layout *layout, int bucket,
                                                 float *elements, size_t *count);

/* Sets initial parameters, which are a function of (seed, element) alone. They are normal with
 * standard deviation 0.02, or 0.02/sqrt(2L) for projections into the residual stream, as in
 * GPT-2 (Radford et al. 2019, 2.3), so that the stream's variance does not grow with depth.
 * Norms are 1. `vector` has room for the parameters of `bucket`, or for all with LAYOUT_ALL. */
enum { LAYOUT_ALL = -1 };
void param_layout_initialise(const struct param_layout *layout, uint64_t seed, int bucket,
                             float *vector);

#endif
