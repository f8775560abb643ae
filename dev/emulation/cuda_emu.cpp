/* cuda_emu.cpp — the scheduler of the emulation, which runs every thread of a block as a fiber. See
 * cuda_emu.h.
 *
 * A fiber leaves only in a barrier, in a warp collective, or at its end. next() chooses the next
 * fiber from the runnable warp with the highest priority, so that one warp gets as far ahead of the
 * others as the barriers let it. Forward, reverse and random orders differ in the priorities of
 * warps, and in the order of blocks and of a warp's lanes.
 *
 * Sanitizers. A fiber switch is announced to the address and the thread sanitizer. This file must
 * not be compiled with -fsanitize=thread, which would count functions entered on one stack and left
 * on another; -DCUDA_EMU_TSAN says that the rest of the program is. For the thread sanitizer a
 * switch makes no order between fibers; __syncthreads, __syncwarp and the end of a launch do.
 * Shuffles, reductions, ldmatrix and mma order no memory, as the PTX ISA says.
 */
#include "dev/emulation/cuda_emu.h"
#include "dev/emulation/ptx_emu.h"

#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <algorithm>
#include <vector>

#ifdef CUDA_EMU_TSAN
extern "C" {
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void *__tsan_get_current_fiber(void);
void __tsan_acquire(void *);
void __tsan_release(void *);
void __tsan_java_init(unsigned long first, unsigned long bytes);
void __tsan_java_alloc(unsigned long first, unsigned long bytes);
}
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif
#ifdef __SANITIZE_ADDRESS__
extern "C" {
void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t size);
void __sanitizer_finish_switch_fiber(void *saved, const void **bottom, size_t *size);
void __asan_poison_memory_region(void const volatile *, size_t);
void __asan_unpoison_memory_region(void const volatile *, size_t);
/* Newer versions would map a second stack for each fiber, which takes a hundred times as long as the fiber. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "detect_stack_use_after_return=0";
}
}
#define ASAN(...) __VA_ARGS__
#else
#define ASAN(...)
#endif

namespace cuda_emu {

enum { READY, IN_BLOCK, EXITED }; /* thread.state; a thread in a warp collective is READY, too */
enum { LANES = 32, MOST_WARPS = 32, MOST_THREADS = 1024 };
static const size_t STACK = 132 << 10, MOST_SHARED = 227 << 10; /* H100's limit for a block */

struct thread *current; /* NULL on the host */
uint3 block_index;
dim3 block_size, grid_size;

static struct thread threads[MOST_THREADS], host;
static char *stacks;
static unsigned char *shared; /* dynamic shared memory */
static size_t shared_bytes;
static char *static_shared; /* the calling thread's copy of the executable's TLS segment */
static size_t static_bytes;
static void (*kernel)(void *);
static void *arguments;

static int count, alive, at_barrier, warps; /* threads of the block */
static uint32_t ready_places, ready_lanes[MOST_WARPS];
static int warp_at[MOST_WARPS], place_of[MOST_WARPS]; /* the warp at place 0 runs first */
static struct group groups[MOST_WARPS][32];
static uint32_t groups_used[MOST_WARPS];
static struct group *joined[MOST_WARPS]; /* what a lane joined last; NULL: nothing yet */

static enum cuda_emu_order order;
static uint64_t random_state = 1;
static pthread_mutex_t one_launch = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
#ifdef CUDA_EMU_TSAN
enum { STACKS = 2 * MOST_THREADS };
/* Two of each: a thread may arrive at the next barrier before others have left this one. */
static char tsan_barrier[2], tsan_warp[MOST_WARPS][2], tsan_start, tsan_end, tsan_fence;
static void *tsan_fibers[STACKS];
#else
enum { STACKS = MOST_THREADS };
#endif

void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    fprintf(stderr, "cuda_emu: ");
    vfprintf(stderr, format, list);
    va_end(list);
    uint3 t = current ? current->index : uint3{0, 0, 0}, b = block_index;
    fprintf(stderr, " [block %u,%u,%u thread %u,%u,%u]\n", b.x, b.y, b.z, t.x, t.y, t.z);
    fflush(NULL);
    abort();
}

static uint32_t random_below(uint32_t n) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545F4914F6CDD1D >> 32) * n >> 32);
}

/* ---- switching stacks ------------------------------------------------------------------------ */

static void fiber(void);

/* Where a thread's stack begins, which grows downward. The offset differs between stacks, since all
 * would otherwise share a few lines of the processor's caches. */
static char *stack_top(const struct thread *t) {
    const size_t number = (size_t)((char *)t->stack - stacks) / STACK;
    return (char *)t->stack + STACK - number % 32 * 704;
}

#if defined(__x86_64__) && !defined(CUDA_EMU_UCONTEXT)
/* Swaps the stack pointer, and the registers that a function must keep by the System V ABI. */
extern "C" void cuda_emu_swap(void **save, void *load);
__asm__(".text\n.globl cuda_emu_swap\n.type cuda_emu_swap,@function\ncuda_emu_swap:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
        ".size cuda_emu_swap,.-cuda_emu_swap\n");

static void prepare(struct thread *t) {
    void **top = (void **)stack_top(t);
    *--top = NULL; /* keeps the stack aligned as after a call */
    *--top = (void *)fiber;
    for (int i = 0; i < 6; i++) *--top = NULL;
    t->stack_pointer = top;
}
static void swap(struct thread *from, struct thread *to) {
    cuda_emu_swap(&from->stack_pointer, to->stack_pointer);
}
#else
static ucontext_t contexts[MOST_THREADS + 1];

static ucontext_t *context(struct thread *t) {
    return &contexts[t == &host ? (int)MOST_THREADS : (int)(t - threads)];
}
static void prepare(struct thread *t) {
    getcontext(context(t));
    context(t)->uc_stack.ss_sp = t->stack;
    context(t)->uc_stack.ss_size = stack_top(t) - (char *)t->stack;
    makecontext(context(t), fiber, 0);
}
static void swap(struct thread *from, struct thread *to) {
    swapcontext(context(from), context(to));
}
#endif

#ifdef __SANITIZE_ADDRESS__
static struct thread *previous;
static const void *host_stack;
static size_t host_stack_bytes;
#endif

static void go(struct thread *to) {
    struct thread *me = current;
    if (to == me) return;
    current = to;
    TSAN(__tsan_switch_to_fiber(to->tsan, 1)); /* 1: no order between the two */
    ASAN(previous = me);
    ASAN(__sanitizer_start_switch_fiber(me->state == EXITED ? NULL : &me->asan_stack,
                                        to == &host ? host_stack : to->stack,
                                        to == &host ? host_stack_bytes : STACK));
    swap(me, to);
    ASAN(__sanitizer_finish_switch_fiber(me->asan_stack, NULL, NULL));
}

/* ---- the next thread ------------------------------------------------------------------------- */

static void make_ready(int warp, uint32_t lanes) {
    ready_lanes[warp] |= lanes;
    ready_places |= 1u << place_of[warp];
}

static int lane_of(uint32_t lanes) { /* the one that runs first */
    if (order == CUDA_EMU_REVERSE) return 31 - __builtin_clz(lanes);
    if (order == CUDA_EMU_RANDOM)
        for (int k = random_below(__builtin_popcount(lanes)); k > 0; k--) lanes &= lanes - 1;
    return __builtin_ctz(lanes);
}

static inline struct thread *next(void) { /* NULL: no thread can run */
    if (!ready_places) return NULL;
    const int warp = warp_at[__builtin_ctz(ready_places)];
    const int lane = lane_of(ready_lanes[warp]);
    ready_lanes[warp] &= ~(1u << lane);
    if (!ready_lanes[warp]) ready_places &= ~(1u << place_of[warp]);
    return &threads[warp * LANES + lane];
}

[[noreturn]] static void deadlock(void) {
    fprintf(stderr, "cuda_emu: deadlock: %d of the block's %d live threads wait at __syncthreads\n",
            at_barrier, alive);
    for (int i = 0; i < count; i++)
        if (threads[i].state != EXITED && (i == 0 || threads[i].where != threads[i - 1].where))
            fprintf(stderr, "  thread %d and those after it wait in %s\n", i, threads[i].where);
    fail("deadlock");
}

static inline void wait(const char *where) {
    current->where = where;
    struct thread *t = next();
    if (!t) deadlock();
    go(t);
}

/* ---- barriers and warp collectives ----------------------------------------------------------- */

static void release_block(void) {
    const char *where = NULL;
    for (int i = 0; i < count; i++) {
        struct thread *t = &threads[i];
        if (t->state != IN_BLOCK) continue;
        if (where && strcmp(where, t->where) != 0)
            fail("threads of one block at different barriers: %s and %s", where, t->where);
        where = t->where;
        t->state = READY;
        make_ready(t->warp, 1u << t->lane);
    }
    at_barrier = 0;
}

void sync_block(const char *where) {
    TSAN(char *barrier = &tsan_barrier[current->barriers++ % 2]);
    TSAN(__tsan_release(barrier));
    current->state = IN_BLOCK;
    current->where = where;
    if (++at_barrier == alive) release_block();
    wait(where);
    TSAN(__tsan_acquire(barrier));
}

void fence(void) {
    TSAN(__tsan_release(&tsan_fence));
    TSAN(__tsan_acquire(&tsan_fence));
}

/* Returns the collective that this lane joins: one with its mask that still waits for lanes, or a
 * new one. It is nearly always the one that another lane has just joined. */
static struct group *find_or_begin(uint32_t mask, enum operation operation, const char *where) {
    struct thread *me = current;
    int present = count - me->warp * LANES;
    if (!(mask >> me->lane & 1)) fail("%s: lane %d is not in mask %08x", where, me->lane, mask);
    if (present < LANES && mask >> present)
        fail("%s: mask %08x names lanes that the block does not have", where, mask);
    struct group *all = groups[me->warp];
    for (uint32_t used = groups_used[me->warp]; used; used &= used - 1) {
        struct group *g = &all[__builtin_ctz(used)];
        if (g->mask != mask || g->arrived == mask) continue;
        if (g->operation != operation) fail("%s: other lanes are in another collective", where);
        return g;
    }
    if (groups_used[me->warp] == 0xffffffffu) fail("%s: too many collectives under way", where);
    int i = __builtin_ctz(~groups_used[me->warp]);
    groups_used[me->warp] |= 1u << i;
    all[i].mask = all[i].left = mask;
    all[i].arrived = 0;
    all[i].operation = operation;
    return &all[i];
}

static inline struct group *join(uint32_t mask, enum operation operation, const char *where) {
    struct group *g = joined[current->warp];
    if (g && g->mask == mask && g->arrived != mask && g->operation == operation &&
        mask >> current->lane & 1)
        return g;
    return joined[current->warp] = find_or_begin(mask, operation, where);
}

void meet(uint32_t mask, enum operation operation, const uint32_t *in, int words_in,
          void (*finish)(struct group *), int source, uint32_t *out, int words_out,
          const char *where) {
    struct thread *me = current;
    struct group *g = join(mask, operation, where);
    for (int i = 0; i < words_in; i++) g->in[me->lane][i] = in[i];
    g->arrived |= 1u << me->lane;
    TSAN(char *barrier = &tsan_warp[me->warp][me->warp_barriers % 2]);
    TSAN(if (operation == SYNCWARP) __tsan_release(barrier), me->warp_barriers++);
    if (g->arrived == mask) {
        if (finish) finish(g);
        make_ready(me->warp, mask);
    }
    wait(where);
    TSAN(if (operation == SYNCWARP) __tsan_acquire(barrier));
    const uint32_t *result = source >= 0 ? g->in[source] : g->out[me->lane];
    for (int i = 0; i < words_out; i++) out[i] = result[i];
    g->left &= ~(1u << me->lane);
    if (!g->left) groups_used[me->warp] &= ~(1u << (g - groups[me->warp]));
}

void finish_ballot(struct group *g) {
    uint32_t votes = 0;
    for (int lane = 0; lane < LANES; lane++)
        if ((g->mask >> lane & 1) && g->in[lane][0]) votes |= 1u << lane;
    for (int lane = 0; lane < LANES; lane++) g->out[lane][0] = votes;
}

/* ---- PTX ------------------------------------------------------------------------------------- */

/* Gives each lane the addresses of the rows that it reads. */
template <bool transposed> static void hand_out_rows(struct group *g) {
    for (int lane = 0; lane < LANES; lane++)
        for (int m = 0; m < 4; m++)
            for (int k = 0; k < 2; k++) {
                int row = transposed ? lane % 4 * 2 + k : lane / 4;
                memcpy(&g->out[lane][4 * m + 2 * k], g->in[8 * m + row], 8);
            }
}
void finish_ldmatrix(struct group *g) {
    hand_out_rows<false>(g);
}
void finish_ldmatrix_trans(struct group *g) {
    hand_out_rows<true>(g);
}

static float bfloat16_half(uint32_t word, int half) {
    return __bfloat162float(__nv_bfloat16{(uint16_t)(word >> 16 * half)});
}

/* "Matrix fragments for mma.m16n8k16 with floating point type": lane = 4 group + thread; a's
 * registers hold rows group and group + 8 of columns 2 thread.., then of columns 8 + 2 thread... */
void finish_mma(struct group *g) {
    float a[16][16], b[16][8]; /* b[k][n] */
    for (int lane = 0; lane < LANES; lane++)
        for (int half = 0; half < 2; half++) {
            int row = lane / 4, column = lane % 4 * 2 + half;
            for (int i = 0; i < 4; i++)
                a[row + i % 2 * 8][column + i / 2 * 8] = bfloat16_half(g->in[lane][i], half);
            for (int i = 0; i < 2; i++)
                b[column + i * 8][row] = bfloat16_half(g->in[lane][4 + i], half);
        }
    float sum[16][8] = {{0}};
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) sum[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) {
            float c;
            memcpy(&c, &g->in[lane][6 + i], 4);
            c += sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
            memcpy(&g->out[lane][i], &c, 4);
        }
}

void copy_issue(void *destination, const void *source, bool valid) {
    struct thread *me = current;
    if ((uintptr_t)destination % 16 || (valid && (uintptr_t)source % 16))
        fail("cp.async: an address is not a multiple of 16");
    if (!is_shared(destination)) fail("cp.async: the destination is not in shared memory");
    if (me->copies == 64) fail("cp.async: too many copies under way");
    me->queue[me->copies++] = {destination, valid ? source : NULL, me->commits};
}

void copy_commit(void) {
    current->commits++;
}

/* Takes from the queue a copy that is not in the last `pending` groups. False: there is none. */
bool copy_next(int pending, struct copy *next) {
    struct thread *me = current;
    for (int i = 0; i < me->copies; i++)
        if (me->queue[i].commit_group < me->commits - pending) {
            *next = me->queue[i];
            me->queue[i] = me->queue[--me->copies];
            return true;
        }
    return false;
}

/* ---- launches -------------------------------------------------------------------------------- */

void *dynamic_shared(void) {
    return shared;
}

bool is_shared(const void *p) {
    uintptr_t at = (uintptr_t)p;
    ASAN(return true); /* __shared__ statics are anywhere */
    return at - (uintptr_t)shared < shared_bytes || at - (uintptr_t)static_shared < static_bytes;
}

/* The first object is the executable. */
static int find_static_shared(struct dl_phdr_info *object, size_t, void *) {
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_TLS) {
            static_shared = (char *)object->dlpi_tls_data;
            static_bytes = object->dlpi_phdr[i].p_memsz;
        }
    return 1;
}

static void fiber(void) {
    ASAN(const void *bottom; size_t bytes);
    ASAN(__sanitizer_finish_switch_fiber(NULL, &bottom, &bytes));
    ASAN(if (previous == &host) host_stack = bottom, host_stack_bytes = bytes);
    TSAN(__tsan_acquire(&tsan_start));
    kernel(arguments);
    struct thread *me = current;
    TSAN(__tsan_release(&tsan_end));
    me->state = EXITED;
    alive--;
    if (me->copies) fail("a thread ends with cp.async copies that it never waited for");
    for (uint32_t used = groups_used[me->warp]; used; used &= used - 1) {
        struct group *g = &groups[me->warp][__builtin_ctz(used)];
        if (g->arrived != g->mask && (g->mask >> me->lane & 1))
            fail("a lane ends while others wait for it in a collective, mask %08x", g->mask);
    }
    if (alive && at_barrier == alive) release_block();
    struct thread *t = next();
    if (!t && alive) deadlock();
    go(t ? t : &host);
    abort();
}

/* NaN in float32 and in bfloat16. The thread sanitizer would notice memset. */
static void fill_with_nan(void *p, size_t bytes) {
#ifdef CUDA_EMU_TSAN
    for (size_t i = 0; i < bytes / 4; i++) ((volatile uint32_t *)p)[i] = 0xffffffffu;
    for (size_t i = bytes / 4 * 4; i < bytes; i++) ((volatile unsigned char *)p)[i] = 0xff;
#else
    if (bytes) memset(p, 0xff, bytes);
#endif
}

#ifdef CUDA_EMU_TSAN
/* The range in which __tsan_java_alloc may be called. */
static void announce_to_tsan(void) {
    uintptr_t ranges[2][2] = {{(uintptr_t)shared, MOST_SHARED},
                              {(uintptr_t)static_shared / 8 * 8, (static_bytes + 15) / 8 * 8}};
    uintptr_t first = UINTPTR_MAX, last = 0;
    for (int i = 0; i < 2; i++)
        if (ranges[i][0]) {
            first = min(first, ranges[i][0]);
            last = max(last, ranges[i][0] + ranges[i][1]);
        }
    __tsan_java_init(first, last - first);
}

/* The next block takes over shared memory: forgets which threads accessed it, and nothing else, so
 * that races between blocks in global memory stay visible. */
static void forget_to_tsan(void) {
    uintptr_t first = (uintptr_t)static_shared / 8 * 8;
    uintptr_t last = ((uintptr_t)static_shared + static_bytes + 7) / 8 * 8;
    if (shared_bytes) __tsan_java_alloc((uintptr_t)shared, (shared_bytes + 7) / 8 * 8);
    if (static_bytes) __tsan_java_alloc(first, last - first);
}

/* Creating a fiber is slow with the thread sanitizer, so fibers are used again. The same thread of
 * the next block gets another fiber, since the sanitizer takes all that one fiber does to be in
 * order, and blocks have no order. Each fiber has its own stack. */
static void take_fiber(struct thread *t, int i, uint32_t block) {
    const int number = (int)((i + block * 17) % (2 * count));
    if (!tsan_fibers[number]) tsan_fibers[number] = __tsan_create_fiber(0);
    t->tsan = tsan_fibers[number];
    t->stack = stacks + number * STACK;
}
#endif

static void set_up(void) {
    shared = (unsigned char *)aligned_alloc(1024, (MOST_SHARED + 1023) / 1024 * 1024);
    stacks = (char *)mmap(NULL, STACK * STACKS, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!shared || stacks == MAP_FAILED) fail("no memory for stacks");
    for (int i = 0; i < MOST_THREADS; i++) threads[i].stack = stacks + i * STACK;
    TSAN(announce_to_tsan());
}

/* Makes the page below each stack that a launch uses inaccessible, so that an overflow is a fault. */
static void guard_stacks(void) {
    static int guarded;
    for (; guarded < count * (STACKS / MOST_THREADS); guarded++)
        if (mprotect(stacks + guarded * STACK, 4096, PROT_NONE)) fail("no memory for stacks");
}

static void set_up_block(uint32_t block) {
    (void)block;
    alive = count;
    at_barrier = 0;
    ready_places = 0;
    for (int w = 0; w < warps; w++) {
        warp_at[w] = order == CUDA_EMU_REVERSE ? warps - 1 - w : w;
        ready_lanes[w] = groups_used[w] = 0;
        joined[w] = NULL;
    }
    for (int w = warps - 1; w > 0 && order == CUDA_EMU_RANDOM; w--)
        std::swap(warp_at[w], warp_at[random_below(w + 1)]);
    for (int w = 0; w < warps; w++) place_of[warp_at[w]] = w;
    for (int i = 0; i < count; i++) {
        struct thread *t = &threads[i];
        t->index = {i % block_size.x, i / block_size.x % block_size.y,
                    i / block_size.x / block_size.y};
        t->warp = i / LANES;
        t->lane = i % LANES;
        t->state = READY;
        t->commits = t->copies = t->barriers = t->warp_barriers = 0;
        /* the last fiber there never returned from its first function */
        ASAN(__asan_unpoison_memory_region(stack_top(t) - 4096, 4096));
        TSAN(take_fiber(t, i, block));
        prepare(t);
        make_ready(t->warp, 1u << t->lane);
    }
}

static void run_block(uint32_t block) {
    block_index = {block % grid_size.x, block / grid_size.x % grid_size.y,
                   block / grid_size.x / grid_size.y};
    ASAN(__asan_unpoison_memory_region(shared, MOST_SHARED));
    fill_with_nan(shared, shared_bytes);
#ifndef __SANITIZE_ADDRESS__
    fill_with_nan(static_shared, static_bytes);
#endif
    ASAN(__asan_poison_memory_region(shared + shared_bytes, MOST_SHARED - shared_bytes));
    TSAN(forget_to_tsan());
    set_up_block(block);
    TSAN(host.tsan = __tsan_get_current_fiber());
    current = &host;
    go(next());
    current = NULL;
}

/* block -> (block * step + start) mod blocks runs through all blocks when step has no factor in
 * common with their number. */
static uint32_t random_step(uint32_t blocks) {
    for (;;) {
        uint32_t step = 1 + random_below(blocks), a = step, b = blocks;
        while (b) a %= b, std::swap(a, b);
        if (a == 1) return step;
    }
}

void run(void (*kernel_)(void *), void *arguments_, dim3 grid, dim3 block, size_t bytes) {
    if (current) fail("a launch inside a kernel, or after a kernel that crashed");
    if (pthread_mutex_lock(&one_launch)) fail("a launch after one that crashed");
    dl_iterate_phdr(find_static_shared, NULL);
    if (!stacks) set_up();
    uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    uint64_t size = (uint64_t)block.x * block.y * block.z;
    if (size < 1 || size > MOST_THREADS || blocks < 1 || blocks > INT32_MAX || grid.y > 65535 ||
        grid.z > 65535 || bytes > MOST_SHARED)
        fail("invalid launch: grid %u,%u,%u, block %u,%u,%u, %zu bytes of shared memory", grid.x,
             grid.y, grid.z, block.x, block.y, block.z, bytes);
    kernel = kernel_, arguments = arguments_;
    grid_size = grid, block_size = block, shared_bytes = bytes;
    count = (int)size, warps = (count + LANES - 1) / LANES;
    guard_stacks();
    std::vector<char> saved(static_shared,
                            static_shared + static_bytes); /* thread_locals of others */
    uint64_t step = 1, start = 0;
    if (order == CUDA_EMU_RANDOM) step = random_step(blocks), start = random_below(blocks);
    TSAN(__tsan_release(&tsan_start));
    for (uint64_t i = 0; i < blocks; i++)
        run_block(order == CUDA_EMU_REVERSE ? blocks - 1 - i : (i * step + start) % blocks);
    TSAN(__tsan_acquire(&tsan_end));
    ASAN(__asan_unpoison_memory_region(shared, MOST_SHARED));
#ifndef __SANITIZE_ADDRESS__
    std::copy(saved.begin(), saved.end(), static_shared);
#endif
    pthread_mutex_unlock(&one_launch);
}

} // namespace cuda_emu

void cuda_emu_order(enum cuda_emu_order order, uint64_t seed) {
    cuda_emu::order = order;
    cuda_emu::random_state = seed * 0x9E3779B97F4A7C15u | 1;
}
