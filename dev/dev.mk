# What only developers build: tests, benchmarks, fuzzers, simulations. The Makefile includes it.
#
# make format       clang-format over all C and CUDA
# make lint         clang-tidy over all C, with the checks of .clang-tidy
# make simulate     simulates a web service beside training (ns-3); takes two cores for two hours
# make tests        the programs that tests run; make instrumented, those of fuzzers and simulations

EMULATED_OBJECTS := $(patsubst %,$(BUILD)/emulated/%.o,$(CUDA_SOURCES) \
                    dev/emulation/device_emulated dev/emulation/cuda_emu dev/emulation/kernel_names \
                    dev/emulation/streams_emu)

# The address sanitizer finds what three checks of the other would, which take a third of the time to compile.
# Some versions of g++ take for uninitialised what two loops leave out alike.
EMULATION_FLAGS := -std=c++17 -DCUDA_EMULATION $(if $(SANITIZE),-O1,-O2) $(DEBUG) -fopenmp $(WARNINGS) -Wno-unknown-pragmas \
                   -Wno-unused-function -Wno-maybe-uninitialized -fno-strict-aliasing \
                   $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all \
                       -fno-sanitize=null$(comma)object-size$(comma)pointer-overflow)

flags_emulated := $(filter-out -Werror,$(CXX) $(EMULATION_FLAGS))
flags_instrumented := $(filter-out -Werror,$(CC) $(SECURE) $(WARNINGS) $(DEBUG))
$(foreach flags,emulated instrumented,$(eval $(call flags_file,$(flags))))

TESTS := $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/*/test_*.c test/*/*/test_*.c))

GPU_PROGRAMS := gpu_check gpu_bench
# Programs that measure our exchange and those that it is compared with. All but the first use MPI.
BENCHES := turn $(if $(filter 1,$(MPI)),exchange collectives ring)
# A simulated network (dev/coexistence).
NS3 := $(BUILD)/dev/coexistence/simulated
NS3_HERE := $(if $(wildcard /usr/include/ns3/internet-module.h),try_simulated)

benches: all $(BENCHES:%=$(BUILD)/dev/bench/network/bench_%) $(BUILD)/bench_load \
         $(BUILD)/dev/coexistence/web_client
tests: all benches $(TESTS) emulated_tests ptx_tests $(BUILD)/emulated/train_llama2 $(GPU_PROGRAMS:%=$(BUILD)/emulated/%) \
       $(if $(SANITIZE),,$(BUILD)/plain/train_llama2 $(NS3_HERE) liblossynet)

# What only tests run is compiled sooner, but for the references that compute much.
$(BUILD)/test/%.o: private OPTIMISE := -O1
# cmocka 2 would rather have other names, which version 1 does not know.
$(BUILD)/test/%.o: private WARNINGS += -Wno-deprecated-declarations
$(BUILD)/test/llmc/operators%.o $(BUILD)/test/llmc/operators.o $(BUILD)/test/cuda/test_cuda_attention.o: \
    private OPTIMISE := $(if $(SANITIZE),-O1,-O3)

# What tests run of a build with sanitizers: all C programs but those whose head comment says otherwise.
sanitized: $(BUILD)/train_llama2 $(BUILD)/tokenize $(BUILD)/test/cuda/emulation_faults \
    $(patsubst %.c,$(BUILD)/%,$(shell grep -L 'no build with sanitizers' $(TESTS:$(BUILD)/%=%.c)))

# The same program on the emulated device, for tests: --device cuda works without a GPU.
$(BUILD)/emulated/train_llama2: $(BUILD)/train_llama2.o $(COMMON_OBJECTS) $(EMULATED_OBJECTS) \
    $(FLAGS)/link
	$(call link,$(LDLIBS))

# The same program with plain loops for matrix products, so that its bits depend on no library (tests).
PLAIN_GEMM := $(BUILD)/plain/llmc/backend/cpu/gemm.o
$(BUILD)/plain/train_llama2: $(BUILD)/train_llama2.o $(PLAIN_GEMM) \
    $(filter-out %/cpu/gemm.o,$(COMMON_OBJECTS)) $(BUILD)/llmc/backend/cuda/backend_none.o \
    $(FLAGS)/link
	$(call link,$(LDLIBS))

$(PLAIN_GEMM): llmc/backend/cpu/gemm.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $<, plain loops'
	@$(CC) $(filter-out -DGEMM_%,$(CPPFLAGS)) -DGEMM_PLAIN $(C_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/bench_load: $(BUILD)/dev/bench/cpu/bench_load.o $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS))

# These check whether a GPU computes right results, and how fast (dev/bench/gpu/gpu_check.py).
$(GPU_PROGRAMS:%=$(BUILD)/emulated/%): $(BUILD)/emulated/%: $(BUILD)/dev/bench/gpu/%.o $(COMMON_OBJECTS) \
    $(EMULATED_OBJECTS) $(FLAGS)/link
$(GPU_PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/dev/bench/gpu/%.o $(OBJECTS) $(FLAGS)/link
$(foreach program,$(GPU_PROGRAMS),$(BUILD)/$(program) $(BUILD)/emulated/$(program)):
	$(call link,$(LDLIBS))

# With sanitizers, -O0 takes half the time to compile, and few tests run these objects.
$(BUILD)/emulated/llmc/backend/cuda/backend_cuda.%.o: llmc/backend/cuda/backend_cuda.cu $(FLAGS)/emulated
	@mkdir -p $(@D)
	@echo '  CXX  $< for $*, emulated'
	@$(CXX) -I. -D_GNU_SOURCE $(EMULATION_FLAGS) $(if $(SANITIZE),-O0) -DBACKEND_DTYPE=$* -MMD -MP -x c++ -c $< -o $@

$(BUILD)/emulated/%.o: %.cu $(FLAGS)/emulated
	@mkdir -p $(@D)
	@echo '  CXX  $<, emulated'
	@$(CXX) -I. -D_GNU_SOURCE $(EMULATION_FLAGS) -MMD -MP -x c++ -c $< -o $@

# The scheduler of fibers is not instrumented with the thread sanitizer, but calls its interface. It and the
# products take most of the time of programs on the emulated device, hence -O3.
$(BUILD)/emulated/%.o: %.cpp $(FLAGS)/emulated
	@mkdir -p $(@D)
	@echo '  CXX  $<, emulated'
	@$(CXX) -I. -D_GNU_SOURCE $(if $(filter thread,$(SANITIZE)),-DCUDA_EMU_TSAN) \
	    $(filter-out -fsanitize=thread,$(EMULATION_FLAGS)) $(if $(SANITIZE),,-O3) -MMD -MP -c $< -o $@

# The operator tests run on the CPU backends, on the CUDA backend (a GPU, or emulated), and on the CUDA
# kernels alone.
OPERATORS := $(patsubst %,$(BUILD)/test/llmc/operators%.o,_arrays _bits _device _exchange _vectors) \
             $(BUILD)/test/llmc/operators.o
$(BUILD)/test/llmc/test_operators: $(OPERATORS)
$(BUILD)/test/cuda/test_operators_device: $(OPERATORS)
$(BUILD)/test/cuda/test_operators_emulated: $(OPERATORS)

# These link the kernels without the CPU backend, so that the thread sanitizer sees all code.
EMULATOR := $(patsubst %,$(BUILD)/emulated/dev/emulation/%.o,cuda_emu kernel_names streams_emu)
EMULATED_TESTS := $(BUILD)/test/cuda/test_cuda_kernels $(BUILD)/test/cuda/test_cuda_attention \
    $(BUILD)/test/cuda/emulation_faults
$(BUILD)/test/cuda/test_cuda_kernels: $(BUILD)/test/cuda/test_cuda_kernels.o $(OPERATORS) \
    $(BUILD)/lossynet/partition/elements.o $(BUILD)/emulated/test/cuda/kernels_backend.o $(EMULATOR)
$(BUILD)/test/cuda/test_cuda_attention: $(BUILD)/test/cuda/test_cuda_attention.o \
    $(BUILD)/test/llmc/operators_arrays.o $(BUILD)/emulated/test/cuda/kernels_backend.o $(EMULATOR)
$(BUILD)/test/cuda/emulation_faults: $(BUILD)/emulated/test/cuda/emulation_faults.o $(EMULATOR)
emulated_tests: $(EMULATED_TESTS)
$(EMULATED_TESTS): $(FLAGS)/link
	$(call link,$(CMOCKA))

# The same tests on the PTX that nvcc makes of the kernels for two targets, translated to C++.
PTX := $(BUILD)/ptx
PTX_TESTS := $(if $(filter 1,$(CUDA)),$(if $(SANITIZE),,$(PTX)/test_cuda_kernels $(PTX)/test_cuda_attention))
$(PTX)/kernels.%.ptx: test/cuda/kernels_backend.cu
	@mkdir -p $(@D)
	@echo '  NVCC $<, PTX $*'
	@$(NVCC) -I. -D_GNU_SOURCE -std=c++17 -O3 -ptx -arch=compute_$* -ccbin $(CXX) -MMD -MP -MF $@.d -o $@ $<
$(PTX)/kernels.cpp: $(PTX)/kernels.80.ptx $(PTX)/kernels.90.ptx $(wildcard dev/emulation/ptx/*.py)
	@echo '  PTX  $@'
	@$(PYTHON) dev/emulation/ptx/translate.py $(filter %.ptx,$^) >$@.new && mv $@.new $@
$(PTX)/kernels.o: $(PTX)/kernels.cpp dev/emulation/ptx/ptx_run.h
	@echo '  CXX  $<'
	@$(CXX) -I. -D_GNU_SOURCE -std=c++17 -DCUDA_EMULATION -O1 $(if $(filter x86_64,$(ARCHITECTURE)),-mfma) \
	    -ffp-contract=off -fno-strict-aliasing -w -c $< -o $@
PTX_OBJECTS := $(PTX)/kernels.o $(BUILD)/emulated/dev/emulation/ptx/ptx_find.o
ptx_tests: $(PTX_TESTS)
$(PTX)/test_cuda_kernels: $(BUILD)/test/cuda/test_cuda_kernels.o $(OPERATORS) \
    $(BUILD)/lossynet/partition/elements.o $(BUILD)/emulated/test/cuda/kernels_backend.o $(EMULATOR) $(PTX_OBJECTS)
$(PTX)/test_cuda_attention: $(BUILD)/test/cuda/test_cuda_attention.o \
    $(BUILD)/test/llmc/operators_arrays.o $(BUILD)/emulated/test/cuda/kernels_backend.o $(EMULATOR) $(PTX_OBJECTS)
$(PTX_TESTS):
	$(call link,$(CMOCKA) -ldl -lm)

# gold links in a third of the time of the default linker, and the tests have 150 programs.
GOLD := $(shell $(CXX) -fuse-ld=gold -Wl,--version >/dev/null 2>&1 && echo -fuse-ld=gold)
$(TESTS) $(EMULATED_TESTS) $(PTX_TESTS): private LDFLAGS += $(GOLD)

# Tests in which lossynet's allocations fail (test/lossynet/failing_memory.h).
$(BUILD)/test/lossynet/test_lossynet $(BUILD)/test/lossynet/test_secure: \
    LDFLAGS += -Wl,--wrap=ln_memory_take
# A test in which a name has two addresses.
$(BUILD)/test/lossynet/test_rendezvous: LDFLAGS += -Wl,--wrap=getaddrinfo
# Tests in which a hook drops, repeats and delays datagrams (test/lossynet/transport/test_lossynet_threads.h).
HOOKED := $(patsubst %,test/lossynet/transport/test_%,lossynet_ranks lossynet_secure lossynet_udp same_bits \
              not_finite)
$(HOOKED:%=$(BUILD)/%) $(HOOKED:%=$(BUILD)/thread/%): LDFLAGS += -Wl,--wrap=ln_dispatch

$(BUILD)/test/%_emulated: $(BUILD)/test/%_emulated.o $(COMMON_OBJECTS) $(EMULATED_OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS) $(CMOCKA))

$(BUILD)/test/%: $(BUILD)/test/%.o $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS) $(CMOCKA))

# ns-3 is built without sanitizers, and its pkg-config files name directories that do not exist. Headers of ns-3.37
# are not C++20, those of ns-3.43 are not C++17.
NS3_STANDARD = $(if $(shell pkg-config --exists 'ns3-core < 3.42' 2>/dev/null && echo older),c++17,c++20)
$(NS3): dev/coexistence/simulated.cpp $(FLAGS)/compile
	@echo '  CXX  $<'
	@mkdir -p $(@D)
	@$(CXX) -std=$(NS3_STANDARD) -O2 $(DEBUG) $(WARNINGS) $< -o $@ -lns3-internet -lns3-point-to-point \
	    -lns3-traffic-control -lns3-network -lns3-core

# For tests, which leave the simulation out where it does not fit the ns-3 that is installed.
try_simulated:
	@mkdir -p $(dir $(NS3))
	@$(MAKE) --no-print-directory $(NS3) >$(NS3).log 2>&1 || \
	    { rm -f $(NS3); echo "the simulated network was not built with this ns-3: $$(grep -m 1 error $(NS3).log)"; }

$(BUILD)/dev/%: $(BUILD)/dev/%.o $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS))

# ---- lossynet alone, instrumented ---------------------------------------------------------
# fuzz_packets    runs four ranks on a simulated network (dev/simulation) that libFuzzer makes up; clang
# replay_packets  does the same for stored inputs, where clang is missing
# round_trips     simulates what a step costs by round trip and loss; optimised and without sanitizers,
#                 since the first two look for faults
# late_ranks      simulates what late ranks cost the others, with a deadline and without; built as
#                 round_trips, since it has many ranks
# long_path       simulates how busy links stay over long round trips; built so, too, since it has
#                 many packets
# bad_paths       simulates paths, peers and strangers that misbehave; built so, too
# dark_links      simulates many ranks while some links are down; built so, too
# thread/...      tests whose ranks are threads, with the thread sanitizer, but without OpenMP: its
#                 library is not built for the sanitizer, which would report races in every barrier
INSTRUMENTED := -std=c11 -D_GNU_SOURCE -I. -Idev/simulation -O1 $(DEBUG) -fno-sanitize-recover=all \
                $(WARNINGS) -Wno-unknown-pragmas \
                $(if $(filter 1,$(SECURE)),-DLOSSYNET_SECURE)
SIMULATION := -fsanitize=address,undefined -include dev/simulation/threads.h
SIMULATED := $(LOSSYNET) dev/fuzz/fuzz_packets.c dev/simulation/simulation.c
THREADED := $(BUILD)/thread/test/lossynet/transport/test_lossynet_udp
HAVE_CLANG := $(shell command -v clang)

instrumented: $(BUILD)/round_trips $(BUILD)/late_ranks $(BUILD)/long_path $(BUILD)/bad_paths \
              $(BUILD)/dark_links $(BUILD)/$(if $(HAVE_CLANG),fuzz,replay)_packets $(THREADED)

$(BUILD)/fuzz/lossynet/%.o: COVERAGE := -fsanitize-coverage=inline-8bit-counters,pc-table
$(BUILD)/fuzz/%.o: %.c $(FLAGS)/instrumented
	@mkdir -p $(@D)
	@echo '  FUZZ $<'
	@clang $(INSTRUMENTED) $(SIMULATION) $(COVERAGE) -MMD -c $< -o $@

$(BUILD)/fuzz_packets: $(SIMULATED:%.c=$(BUILD)/fuzz/%.o)
	$(call link,$(LOSSYNET_LIBS),clang -fsanitize=fuzzer$(comma)address$(comma)undefined)

$(BUILD)/replay/%.o: %.c $(FLAGS)/instrumented
	@mkdir -p $(@D)
	@echo '  CC   $<, simulated'
	@$(CC) $(INSTRUMENTED) $(SIMULATION) -DREPLAY -MMD -c $< -o $@

$(BUILD)/replay_packets: $(SIMULATED:%.c=$(BUILD)/replay/%.o)
	$(call link,$(LOSSYNET_LIBS),$(CC) -fsanitize=address$(comma)undefined)

# Checks of glibc, the default in some distributions, forbid fibers' jumps to other stacks.
$(BUILD)/simulated/%.o: %.c $(FLAGS)/instrumented
	@mkdir -p $(@D)
	@echo '  CC   $<, simulated'
	@$(CC) $(INSTRUMENTED) -O2 -U_FORTIFY_SOURCE -include dev/simulation/threads.h -MMD -c $< -o $@

SIMULATED_RANKS := $(BUILD)/late_ranks $(BUILD)/long_path $(BUILD)/bad_paths $(BUILD)/round_trips \
                   $(BUILD)/dark_links
$(SIMULATED_RANKS): $(BUILD)/%: $(patsubst %.c,$(BUILD)/simulated/%.o,$(LOSSYNET) \
                                  dev/simulation/simulation.c) $(BUILD)/simulated/dev/simulation/%.o
	$(call link,$(LOSSYNET_LIBS))

$(BUILD)/thread/%.o: %.c $(FLAGS)/instrumented
	@mkdir -p $(@D)
	@echo '  CC   $<, thread sanitizer'
	@$(CC) $(INSTRUMENTED) -fsanitize=thread -MMD -c $< -o $@

$(BUILD)/thread/test/%: $(BUILD)/thread/test/%.o $(LOSSYNET:%.c=$(BUILD)/thread/%.o)
	$(call link,$(LOSSYNET_LIBS) -lcmocka,$(CC) -fsanitize=thread)

# ---- another processor --------------------------------------------------------------------
# The program for aarch64, by a cross compiler, and tests that qemu-user runs: see
# test/system/test_aarch64.py. Only the compiler's own libraries are needed for that processor, since
# all others have a switch. -O1 compiles in half the time of -O3.
AARCH64_PROGRAMS := train_llama2 test/llmc/test_operators test/lossynet/partition/test_elements
aarch64:
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/aarch64 OPTIMISE=-O1 BARE=1 BLAS=none MPI=0 \
	    VERBS=0 SECURE=0 MEET=0 CUDA=0 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ \
	    $(AARCH64_PROGRAMS:%=$(BUILD)/aarch64/%)

# Programs that test the readers of file formats: with libFuzzer, and once over the stored corpus.
# test/llmc/test_fuzz_formats.py uses the second where clang is missing.
FUZZED := dev/fuzz/fuzz_formats.c llmc/checkpoint/hf_model.c llmc/model/config.c llmc/model/tensors.c \
          llmc/data/dataloader.c llmc/util/file.c llmc/log/error.c llmc/checkpoint/safetensors.c \
          llmc/checkpoint/sharded_model.c llmc/checkpoint/checksum.c llmc/checkpoint/carried.c \
          llmc/log/terminal.c lossynet/loss/loss_model.c lossynet/loss/loss_replay.c lossynet/loss/at.c \
          lossynet/base/log.c lossynet/base/memory.c
FUZZ_FLAGS := -std=c11 -O1 $(DEBUG) -Wall -Wextra -fno-sanitize-recover=all \
              -Wl,--wrap=file_map,--wrap=file_unmap
FUZZED_HEADERS := $(wildcard llmc/*/*.h lossynet/*.h lossynet/*/*.h lossynet/*/*/*.h)
$(BUILD)/fuzz_formats: $(FUZZED) $(FUZZED_HEADERS) $(FLAGS)/compile
	clang $(CPPFLAGS) $(FUZZ_FLAGS) -Wno-unknown-pragmas -Wno-source-uses-openmp \
	    -fsanitize=fuzzer,address,undefined $(FUZZED) -lm -ljansson -lxxhash -o $@
$(BUILD)/replay_formats: $(FUZZED) $(FUZZED_HEADERS) $(FLAGS)/compile
	$(CC) $(CPPFLAGS) $(FUZZ_FLAGS) -DREPLAY -fopenmp -fsanitize=address,undefined $(FUZZED) \
	    -lm -ljansson -lxxhash -o $@

# What different versions of clang-format write differs a little. Version 14 is Debian 12's.
FORMATTED = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' 2>/dev/null)
CLANG_FORMAT = $(shell for program in clang-format-14 clang-format; do \
    $$program --version 2>/dev/null | grep -q 'version 14\.' && echo $$program && break; done)
NOT_FORMATTED = $(if $(CLANG_FORMAT),$(if $(FORMATTED),,this is no git clone),no clang-format of version 14 here)

# Warnings are errors with the compilers whose warnings were all read. A newer one may have others.
STRICT = WERROR=$(if $(filter 12.% 12 13.% 13 14.% 14,$(shell $(CC) -dumpversion)),-Werror)

# The longest chain of commands comes first, so that no core waits for its end.
test:
	@scripts/dependencies.sh test
	@$(MAKE) --no-print-directory $(STRICT) $(JOBS) ptx_tests with_thread_sanitizer tests python_tests instrumented with_sanitizers \
	    $$(command -v aarch64-linux-gnu-g++ >/dev/null && echo aarch64)
	@BUILD=$(BUILD) $(PYTHON) test/run.py $(PYTEST)

# Compiles the Python tests once, for all processes of run.py. It reports no error, since they will.
python_tests:
	@BUILD=$(BUILD) $(PYTHON) -m pytest -q --collect-only test >/dev/null 2>&1 || true

# Other builds than that of users. They are made beside it, so that no core waits for the end of one.
with_sanitizers:
	@$(MAKE) --no-print-directory sanitized BUILD=$(BUILD)/sanitize SANITIZE=address,undefined OPTIMISE=-O1 CUDA=0

with_thread_sanitizer:
	@$(MAKE) --no-print-directory emulated_tests BUILD=$(BUILD)/emulated_thread SANITIZE=thread OPTIMISE=-O1

# The quick tests have a build of their own, of these programs alone, without CUDA and with less
# optimisation. They are the C programs whose head comment does not say that they take more than 10
# seconds, without those that need a device or the emulated one (test/conftest.py).
QUICK_TESTS = $(patsubst %.c,$(BUILD)/%,$(shell grep -L -E 'Takes (1[1-9]|[2-9][0-9]|[0-9]{3,}) s\b' \
                $(TESTS:$(BUILD)/%=%.c) | grep -v -E '_(device|emulated)\.c'))
quick_tests: all $(QUICK_TESTS)

check:
	@scripts/dependencies.sh check
	@$(MAKE) --no-print-directory $(STRICT) $(JOBS) quick_tests check-format check-layers BUILD=$(BUILD)/check OPTIMISE=-O1 CUDA=0
	@BUILD=$(BUILD)/check $(PYTHON) test/run.py --quick $(PYTEST)

check-format:
	@$(if $(NOT_FORMATTED),echo "$(NOT_FORMATTED): formatting was not checked",\
	    echo $(FORMATTED) | xargs -n 64 -P $$(nproc) $(CLANG_FORMAT) --dry-run -Werror)

# Checks that folders include and call only those of lower layers, and that no files call in a circle.
check-layers: $(LOSSYNET:%.c=$(BUILD)/%.o) $(LLMC:%.c=$(BUILD)/%.o)
	@$(PYTHON) dev/check_layers.py --build $(BUILD)

bench:
	@scripts/dependencies.sh bench
	@$(MAKE) --no-print-directory $(JOBS) all $(BUILD)/bench_load
	@$(BUILD)/bench_load $(BUILD)/bench-model || true
	@status=0; $(PYTHON) dev/bench/cpu/bench_cpu.py $(BENCH) || status=1; \
	$(MAKE) --no-print-directory bench-network || status=1; exit $$status

bench-network:
	@scripts/dependencies.sh bench
	@$(MAKE) --no-print-directory $(JOBS) benches
	@BUILD=$(BUILD) $(PYTHON) dev/bench/network/bench_network.py $(BENCH_NETWORK)
	@$(MAKE) --no-print-directory $(BUILD)/late_ranks liblossynet
	@BUILD=$(BUILD) $(PYTHON) dev/bench/network/bench_late.py
	@BUILD=$(BUILD) $(PYTHON) dev/bench/network/bench_group.py
	@BUILD=$(BUILD) $(PYTHON) dev/bench/network/bench_rule.py

format:
	@$(if $(NOT_FORMATTED),echo "make format: $(NOT_FORMATTED)" >&2; exit 1,echo $(FORMATTED) | xargs $(CLANG_FORMAT) -i)

# Kernels and simulated.cpp are left out, since clang cannot compile them without CUDA and ns-3. The
# static analyzer, which takes most of the time, leaves out tests and developers' tools. A file is
# checked again if it, a header or the list of checks has changed.
LINTED := $(LLMC) $(LOSSYNET) $(TOKENIZE) $(TOKENIZER).cpp train_llama2.cu \
          llmc/backend/cpu/backend_cpu.c llmc/backend/cuda/backend_none.c $(wildcard dev/examples/*.c) \
          $(wildcard test/*/*.c test/*/*/*.c dev/fuzz/*.c dev/simulation/*.c dev/coexistence/*.c \
                     dev/bench/*/*.c)
LINT_HEADERS := $(shell git ls-files '*.h' 2>/dev/null)

lint:
	@scripts/dependencies.sh lint
	@$(MAKE) --no-print-directory -k $(JOBS) $(LINTED:%=$(BUILD)/lint/%.ok)

$(BUILD)/lint/test/% $(BUILD)/lint/dev/fuzz/% $(BUILD)/lint/dev/simulation/% \
    $(BUILD)/lint/dev/coexistence/% $(BUILD)/lint/dev/bench/%: \
    TIDY := --checks='-clang-analyzer-*'
$(BUILD)/lint/%.ok: % .clang-tidy $(LINT_HEADERS)
	@mkdir -p $(@D)
	@echo '  LINT $<'
	@clang-tidy --quiet $(TIDY) $< -- $(if $(filter %.cpp,$<),-std=c++17,-x c -std=c11) $(CPPFLAGS) \
	    -fopenmp -DISA=lint -DGIT_REVISION='"lint"' -Ilossynet -Idev/simulation 2>$@.log || \
	    { cat $@.log; exit 1; }
	@touch $@

simulate:
	@scripts/dependencies.sh simulate
	@$(MAKE) --no-print-directory $(NS3)
	@BUILD=$(BUILD) $(PYTHON) dev/coexistence/simulated.py $(SIMULATE)

.PHONY: try_simulated aarch64 sanitized with_sanitizers with_thread_sanitizer format lint benches tests emulated_tests ptx_tests \
    instrumented quick_tests python_tests check check-format check-layers test bench bench-network simulate
