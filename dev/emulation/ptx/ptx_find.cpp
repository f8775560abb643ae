/* ptx_find.cpp — gives launch() (cuda_emu.h) the PTX of the kernel that it launches. A program with
 * this file runs all kernels as PTX; one without PTX ends it.
 *
 *   PTX_TARGET=80|90    as compiled for this target; 90 without it
 *   PTX_REPORT=FILE     at the end, appends how many kernels ran */
#include "dev/emulation/kernel_names.h"
#include "dev/emulation/ptx/ptx_run.h"

#include <set>

uint32_t ptx_static_begin;
static std::set<std::string> used;

static int target_wanted(void) {
    const char *wanted = getenv("PTX_TARGET");
    return wanted ? atoi(wanted) : 90;
}

/* nvcc names a static kernel as one that is not static: _Z instead of _ZL. */
static std::string name_in_ptx(const std::string &name) {
    return name.compare(0, 3, "_ZL") ? name : "_Z" + name.substr(3);
}

static void report(void) {
    FILE *file = fopen(getenv("PTX_REPORT"), "a");
    if (!file) return;
    fprintf(file, "%d %zu\n", target_wanted(), used.size());
    fclose(file);
}

namespace cuda_emu {

const struct ptx_kernel *find_ptx(void *kernel) {
    static std::map<void *, const struct ptx_kernel *> known;
    if (known.empty() && getenv("PTX_REPORT")) atexit(report);
    if (known.count(kernel)) return known[kernel];
    std::string names;
    const auto found = functions().equal_range((uintptr_t)kernel);
    for (auto f = found.first; f != found.second; ++f) {
        const std::string name = name_in_ptx(f->second);
        for (const struct ptx_kernel *k = ptx_kernels; k->name; k++) {
            if (k->target != target_wanted() || name != k->name) continue;
            used.insert(name);
            return known[kernel] = k;
        }
        names += " " + f->second;
    }
    fail("no PTX for target %d of the kernel%s", target_wanted(), names.c_str());
}

void run_ptx(const struct ptx_kernel *kernel, const std::string &params, dim3 grid, dim3 block,
             size_t shared_bytes) {
    if (params.size() != kernel->param_bytes)
        fail("%s: %zu bytes of parameters: PTX has %u", kernel->name, params.size(),
             kernel->param_bytes);
    std::pair<const struct ptx_kernel *, const char *> call(kernel, params.data());
    ptx_static_begin = (uint32_t)(shared_bytes + 127) / 128 * 128;
    run(
        [](void *p) {
            const auto *c = (const std::pair<const struct ptx_kernel *, const char *> *)p;
            c->first->run(c->second);
        },
        &call, grid, block, ptx_static_begin + kernel->static_bytes);
}

} // namespace cuda_emu
