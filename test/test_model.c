/* test_model.c — the whole model against Hugging Face's LlamaForCausalLM.
 *
 * test/goldens/NAME holds what dev/make_goldens.py computed with transformers in float64: a model,
 * a batch, its logits, its loss, the gradient of every parameter, and the losses of 20 AdamW steps.
 * Forward and backward are train_llama2.cu's own, included here.
 */
#define TESTING /* without main */
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../train_llama2.cu"

#include "llmc/safetensors.h"
#include "llmc/sampler.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static const char *const goldens[] = {"test/goldens/plain", "test/goldens/grouped"};

struct golden {
    struct layout layout;
    struct safetensors *file;
    const struct backend *be;
    struct activations a;
    float *params, *grads;
    int B, T;
};

static const struct safetensors_view *find(const struct golden *g, const char *name) {
    const struct safetensors_view *view = safetensors_find(g->file, name);
    if (!view) fail_msg("the golden has no %s", name);
    return view;
}

/* Norm-wise relative error of x against the golden's tensor. */
static double distance(const struct golden *g, const char *name, const float *x) {
    const struct safetensors_view *view = find(g, name);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < view->elements; i++) {
        float y;
        memcpy(&y, (const char *)view->data + 4 * i, sizeof y);
        difference += ((double)x[i] - y) * ((double)x[i] - y);
        norm += (double)y * y;
    }
    assert_true(norm > 0);
    return sqrt(difference / norm);
}

static void golden_open(const char *directory, struct golden *g) {
    char path[256];
    struct llama_config c;
    memset(g, 0, sizeof *g);
    assert_int_equal(config_read(directory, &c), 0);
    assert_int_equal(layout_build(&c, &g->layout), 0);
    snprintf(path, sizeof path, "%s/golden.safetensors", directory);
    assert_int_equal(safetensors_open(path, &g->file), 0);
    g->be = backend_cpu();
    const struct safetensors_view *tokens = find(g, "tokens"), *targets = find(g, "targets");
    g->B = (int)tokens->shape[0];
    g->T = (int)tokens->shape[1];
    assert_int_equal(activations_allocate(&g->a, &c, g->be, g->B, g->T, true), 0);
    memcpy(g->a.tokens, tokens->data, tokens->bytes);
    memcpy(g->a.targets, targets->data, targets->bytes);
    g->params = (float *)g->be->allocate(g->layout.count * sizeof(float));
    g->grads = (float *)g->be->allocate(g->layout.count * sizeof(float));
    struct named_tensor tensors[64];
    size_t count = checkpoint_tensor_count(&c);
    assert_true(count <= 64);
    layout_tensors(&g->layout, g->params, tensors);
    assert_int_equal(checkpoint_read(directory, &c, tensors, count), 0);
}

static void golden_close(struct golden *g) {
    g->be->release(g->params);
    g->be->release(g->grads);
    activations_release(&g->a, g->be);
    safetensors_close(g->file);
    layout_release(&g->layout);
}

static void forward_backward(struct golden *g) {
    model_forward_backward(g->be, &g->layout, g->params, g->grads, &g->a, g->B, g->T,
                           1.0f / (float)(g->B * g->T), false, NULL);
}

static void logits_agree(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct golden g;
        golden_open(goldens[i], &g);
        const struct llama_config *c = &g.layout.config;
        float *logits = (float *)calloc((size_t)g.B * g.T * c->vocabulary, sizeof *logits);
        model_forward(g.be, &g.layout, g.params, &g.a, g.B, g.T, NULL);
        g.be->matmul_forward(logits, g.a.last_norm, g.params + g.layout.classifier, g.B * g.T,
                             c->width, c->vocabulary);
        assert_true(distance(&g, "logits", logits) < 1e-5);
        free(logits);
        golden_close(&g);
    }
}

/* Generation: 3 tokens at once, then 2, then one at a time, behind kept keys and values. */
static void cached_logits_agree(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct golden g;
        golden_open(goldens[i], &g);
        const struct llama_config *c = &g.layout.config;
        const size_t V = (size_t)c->vocabulary;
        struct activations kept;
        assert_int_equal(activations_allocate(&kept, c, g.be, 1, g.T, false), 0);
        assert_int_equal(activations_add_cache(&kept, c, g.be), 0);
        struct trainer t;
        memset(&t, 0, sizeof t);
        t.be = g.be;
        t.layout = g.layout;
        t.engine = &kept;
        struct writer w = {&t, g.params};
        float *logits = (float *)calloc((size_t)g.B * g.T * V, sizeof *logits);
        const struct safetensors_view *golden = find(&g, "logits");
        memcpy(logits, golden->data, golden->bytes); /* what is not generated stays golden */
        for (int b = 0; b < g.B; b++) {
            for (int first = 0, count = 3; first < g.T; first += count, count = first < 5 ? 2 : 1) {
                const int last = b * g.T + first + count - 1;
                memset(logits + (size_t)last * V, 0, V * sizeof *logits);
                feed_model(&w, g.a.tokens + b * g.T + first, first, count, logits + last * V);
            }
        }
        assert_true(distance(&g, "logits", logits) < 1e-5);
        free(logits);
        activations_release(&kept, g.be);
        golden_close(&g);
    }
}

static void loss_agrees(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct golden g;
        golden_open(goldens[i], &g);
        forward_backward(&g);
        float loss = (float)mean_loss(g.a.losses, g.B * g.T);
        assert_true(distance(&g, "loss", &loss) < 1e-5);
        golden_close(&g);
    }
}

static void every_gradient_agrees(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct golden g;
        struct named_tensor tensors[64];
        golden_open(goldens[i], &g);
        forward_backward(&g);
        layout_tensors(&g.layout, g.grads, tensors);
        size_t count = checkpoint_tensor_count(&g.layout.config);
        for (size_t t = 0; t < count; t++) {
            char name[128];
            snprintf(name, sizeof name, "grad.%.96s", tensors[t].name);
            double error = distance(&g, name, tensors[t].data);
            if (!(error < 1e-5)) fail_msg("%s: %s: relative error %g", goldens[i], name, error);
        }
        golden_close(&g);
    }
}

/* Micro-batches: two parts of the batch, one after the other, add up to the same gradient. */
static void accumulated_gradients_agree(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct golden g;
        struct named_tensor tensors[64];
        golden_open(goldens[i], &g);
        assert_true(g.B >= 2);
        for (int m = 0; m < 2; m++) {
            const int first = m * (g.B / 2), B = m ? g.B - g.B / 2 : g.B / 2;
            const size_t skip = (size_t)first * g.T * 4, bytes = (size_t)B * g.T * 4;
            memcpy(g.a.tokens, (const char *)find(&g, "tokens")->data + skip, bytes);
            memcpy(g.a.targets, (const char *)find(&g, "targets")->data + skip, bytes);
            model_forward_backward(g.be, &g.layout, g.params, g.grads, &g.a, B, g.T,
                                   1.0f / (float)(g.B * g.T), m > 0, NULL);
        }
        layout_tensors(&g.layout, g.grads, tensors);
        for (size_t t = 0; t < checkpoint_tensor_count(&g.layout.config); t++) {
            char name[128];
            snprintf(name, sizeof name, "grad.%.96s", tensors[t].name);
            assert_true(distance(&g, name, tensors[t].data) < 1e-5);
        }
        golden_close(&g);
    }
}

/* 20 steps of AdamW with clipping and weight decay on matrices, as train_llama2.cu makes them. */
static void adamw_steps_agree(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct golden g;
        struct options o;
        struct trainer t;
        struct worker w;
        golden_open(goldens[i], &g);
        memset(&o, 0, sizeof o);
        memset(&t, 0, sizeof t);
        memset(&w, 0, sizeof w);
        o.beta1 = 0.9;
        o.beta2 = 0.95;
        o.adam_eps = 1e-8;
        o.weight_decay = 0.1;
        o.clip = 1;
        t.options = &o;
        t.be = g.be;
        t.layout = g.layout;
        w.params = g.params;
        w.grads = g.grads;
        w.m = (float *)g.be->allocate(g.layout.count * sizeof(float));
        w.v = (float *)g.be->allocate(g.layout.count * sizeof(float));
        float losses[20];
        for (int step = 0; step < 20; step++) {
            forward_backward(&g);
            losses[step] = (float)mean_loss(g.a.losses, g.B * g.T);
            double norm = sqrt(g.be->sum_of_squares(g.grads, g.layout.count));
            update_range(&t, &w, w.m, w.v, 0, g.layout.count, step, 1e-3, clip_scale(&t, norm));
        }
        assert_true(losses[19] < losses[0]);
        const struct safetensors_view *golden = find(&g, "adamw_losses");
        assert_int_equal(golden->elements, 20);
        for (int step = 0; step < 20; step++) {
            float expected;
            memcpy(&expected, (const char *)golden->data + 4 * step, sizeof expected);
            assert_true(fabsf(losses[step] - expected) < 1e-4f * expected);
        }
        g.be->release(w.m);
        g.be->release(w.v);
        golden_close(&g);
    }
}

/* Every parameter belongs to exactly one tensor and one bucket. */
static void layout_tiles_the_vector(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        struct llama_config c;
        struct layout l;
        assert_int_equal(config_preset("260K", &c), 0);
        c.vocabulary = 512;
        c.tied = tied;
        assert_int_equal(layout_build(&c, &l), 0);
        assert_int_equal(l.count, config_parameters(&c));
        size_t end = 0, in_buckets = 0;
        for (int s = 0; s < l.spans; s++) {
            assert_int_equal(l.span[s].offset, end);
            end += l.span[s].count;
        }
        for (int b = 0; b < l.buckets; b++) in_buckets += l.bucket_elements[b];
        assert_int_equal(end, l.count);
        assert_int_equal(in_buckets, l.count);
        layout_release(&l);
    }
}

static void learning_rate_follows_the_schedule(void **state) {
    (void)state;
    assert_float_equal(schedule_learning_rate(0, 100, 10, 1.0, 0.1), 0.1, 1e-12);
    assert_float_equal(schedule_learning_rate(9, 100, 10, 1.0, 0.1), 1.0, 1e-12);
    assert_float_equal(schedule_learning_rate(10, 100, 10, 1.0, 0.1), 1.0, 1e-12);
    assert_float_equal(schedule_learning_rate(99, 100, 10, 1.0, 0.1), 0.1, 1e-12);
    assert_float_equal(schedule_learning_rate(0, 1, 0, 1.0, 0.1), 1.0, 1e-12);
    for (int s = 10; s < 99; s++) {
        assert_true(schedule_learning_rate(s + 1, 100, 10, 1.0, 0.1) <
                    schedule_learning_rate(s, 100, 10, 1.0, 0.1));
    }
}

static void sampler_draws_as_told(void **state) {
    (void)state;
    const float logits[4] = {0, 2, 1, 2};
    struct sampler_choice scratch[4];
    int counts[4] = {0};
    assert_int_equal(sampler_draw(logits, 4, 0, 1, 0.5, scratch), 1);
    for (int i = 0; i < 10000; i++) {
        counts[sampler_draw(logits, 4, 1, 1, (i + 0.5) / 10000, scratch)]++;
    }
    const double sum = 1 + exp(1) + 2 * exp(2);
    assert_float_equal(counts[0] / 1e4, 1 / sum, 1e-3);
    assert_float_equal(counts[1] / 1e4, exp(2) / sum, 1e-3);
    assert_float_equal(counts[2] / 1e4, exp(1) / sum, 1e-3);
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < 1000; i++) {
        counts[sampler_draw(logits, 4, 1, 0.5, (i + 0.5) / 1000, scratch)]++;
    }
    assert_true(counts[1] > 0 && counts[3] > 0 && counts[0] == 0 && counts[2] == 0);

    /* many tokens, few of them likely: drawn from the smallest set that makes up top_p */
    enum { V = 1000 };
    float long_tail[V];
    struct sampler_choice room[V];
    for (int i = 0; i < V; i++) long_tail[i] = -0.1f * (float)i;
    const double whole = (1 - exp(-0.1 * V)) / (1 - exp(-0.1));
    const double top_p[] = {0.1, 0.5, 0.9, 0.999};
    for (int k = 0; k < 4; k++) {
        int most = 0, expected = 0;
        for (double mass = 0; mass < top_p[k] * whole; expected++) mass += exp(-0.1 * expected);
        for (int i = 1; i <= 1000; i++) {
            int token = sampler_draw(long_tail, V, 1, top_p[k], i / 1000.0 - 1e-9, room);
            if (token > most) most = token;
        }
        assert_int_equal(most, expected - 1);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_agree),
        cmocka_unit_test(cached_logits_agree),
        cmocka_unit_test(loss_agrees),
        cmocka_unit_test(every_gradient_agrees),
        cmocka_unit_test(accumulated_gradients_agree),
        cmocka_unit_test(adamw_steps_agree),
        cmocka_unit_test(layout_tiles_the_vector),
        cmocka_unit_test(learning_rate_follows_the_schedule),
        cmocka_unit_test(sampler_draws_as_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
