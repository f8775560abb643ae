# make              build/train_llama2
# make quickstart   installs what is missing, trains with and without packet loss, shows what it cost
# make check        formatting, layers and the quick tests, in a minute; run it before a commit
# make test         installs what is missing, runs everything in test/
# make bench        compares speed and memory with PyTorch, and the network with TCP (bench-network)
# make simulate     simulates a web service beside training (ns-3); takes two cores for two hours
# make liblossynet  the library alone, static and shared; make install PREFIX=/usr/local DESTDIR=
#                   copies it, its headers and lossynet.pc; make uninstall removes them
# make format       clang-format over all C and CUDA
# make lint         clang-tidy over all C, with the checks of .clang-tidy
# make clean        removes build/ (out/ stays)
#
# The Makefile finds these libraries, and NAME=0 builds without one: MPI (mpicc; MPI=0), libibverbs (for
# --link verbs; VERBS=0), OpenSSL (for --encrypt; SECURE=0), libcurl (for --meet; MEET=0), CUDA (nvcc;
# CUDA=0). Matrix products come from oneDNN (on x86-64) or OpenBLAS (elsewhere, or with BLAS=openblas);
# BLAS=none takes plain loops. BARE=1 is for GPU machines without Jansson, xxHash, SentencePiece, cmocka
# and libcurl: dev/bare replaces them, so there is no JSON (no logs, no checkpoints) and no tokenizer.
# WERROR= allows warnings, for compilers that the project was not tested with. SANITIZE=address,undefined
# builds with sanitizers. With other flags than before, make builds again what depends on them; a BUILD
# of its own keeps both.

# Without this, make would try to build the .d files below by its built-in rules.
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := all
comma := ,

BUILD ?= build
ifeq ($(origin CC),default)
CC := gcc
endif
JOBS := -j$(shell nproc)
WERROR ?= -Werror
WARNINGS := -Wall -Wextra $(WERROR)
OPTIMISE ?= -O3 -fno-math-errno -fno-trapping-math
# Functions and lines, for backtraces and profiles. DEBUG=-g adds local variables, and compiles for a third longer.
DEBUG ?= -g1
CPPFLAGS := $(CPPFLAGS) -I. -D_GNU_SOURCE
# The distribution's Python, because the Python packages are Debian's.
PYTHON ?= /usr/bin/python3
COMMON = $(OPTIMISE) $(DEBUG) -fopenmp $(WARNINGS) $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all)
CFLAGS += -std=c11 $(COMMON)
SHARED := -fPIC -fvisibility=hidden -fno-semantic-interposition
CXXFLAGS += -std=c++17 $(COMMON)
LDLIBS := $(LDLIBS) -lm -ldl
# gold links in a third of the time of the default linker, and the tests have 150 programs.
GOLD := $(shell $(CXX) -fuse-ld=gold -Wl,--version >/dev/null 2>&1 && echo -fuse-ld=gold)
LDFLAGS += $(GOLD)

# ---- libraries, each with its switch ------------------------------------------------------
# Open MPI's mpicc prints its flags with -showme; MPICH's prints a whole command, whose first word is the compiler.
MPI ?= $(if $(shell command -v mpicc),1)
mpi_flags = $(shell mpicc -showme:$(1) 2>/dev/null || mpicc -$(1)_info 2>/dev/null | cut -d ' ' -f 2-)
ifeq ($(MPI),1)
MPI_LIBS := $(call mpi_flags,link)
CPPFLAGS += -DLOSSYNET_MPI $(call mpi_flags,compile)
LDLIBS += $(MPI_LIBS)
endif
SECURE ?= $(if $(shell pkg-config --exists 'libcrypto >= 3' 2>/dev/null && echo yes),1)
ifeq ($(SECURE),1)
CPPFLAGS += -DLOSSYNET_SECURE
LDLIBS += -lcrypto
endif
VERBS ?= $(if $(shell pkg-config --exists libibverbs 2>/dev/null && echo yes),1)
ifeq ($(VERBS),1)
CPPFLAGS += -DLOSSYNET_VERBS $(shell pkg-config --cflags libibverbs)
LDLIBS += $(shell pkg-config --libs libibverbs)
endif
MEET ?= $(if $(filter 1,$(BARE)),,$(if $(shell pkg-config --exists libcurl 2>/dev/null && echo yes),1))
ifeq ($(MEET),1)
# The program opens libcurl when --meet asks for it (etcd.c).
CPPFLAGS += -DLLMC_MEET $(shell pkg-config --cflags libcurl)
endif
# Of the compiler, which may be a cross compiler: CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++.
ARCHITECTURE := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null)))
BLAS ?= $(if $(filter x86_64,$(ARCHITECTURE)),onednn,openblas)
ifeq ($(BLAS),onednn)
CPPFLAGS += -DGEMM_ONEDNN
LDLIBS += -ldnnl
else ifeq ($(BLAS),none)
CPPFLAGS += -DGEMM_PLAIN
else
LDLIBS += -lopenblas
endif
ifeq ($(BARE),1)
CPPFLAGS += -Idev/bare
WARNINGS += -Wno-maybe-uninitialized
TOKENIZER := dev/bare/bare
else
LDLIBS += -ljansson -lxxhash -lsentencepiece
CMOCKA := -lcmocka
TOKENIZER := llmc/data/tokenizer
endif
NVCC ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA ?= $(if $(NVCC),1)
# The toolkit's folder; NVCC may be a link into it. If it has no cuBLAS, as in small images, cuBLAS is
# taken from the packages of a Python that has PyTorch.
TOOLKIT = $(abspath $(dir $(realpath $(NVCC)))/..)
CUBLAS ?= $(if $(wildcard $(TOOLKIT)/include/cublasLt.h /usr/include/cublasLt.h),,$(patsubst \
    %/include/cublasLt.h,%,$(firstword $(wildcard $(addsuffix /*/include/cublasLt.h,$(shell \
    python3 -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null))))))

REVISION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)

# ---- sources ------------------------------------------------------------------------------
# The CPU backend is compiled once per working type and instruction set; the best one is chosen when
# it starts.
ISAS := $(if $(filter x86_64,$(ARCHITECTURE)),x86_64_v2 x86_64_v3 x86_64_v4,generic)
ISAS_BF16 := $(ISAS) $(if $(filter x86_64,$(ARCHITECTURE)),x86_64_avx512bf16 x86_64_amx)
# Each of these also gets -ffp-contract=fast: it may contract a * b + c, which -std=c11 forbids gcc.
isa_flags_generic :=
isa_flags_x86_64_v2 := -march=x86-64-v2
isa_flags_x86_64_v3 := -march=x86-64-v3
isa_flags_x86_64_v4 := -march=x86-64-v4 -mprefer-vector-width=512
isa_flags_x86_64_avx512bf16 := $(isa_flags_x86_64_v4) -mavx512bf16
isa_flags_x86_64_amx := $(isa_flags_x86_64_avx512bf16) -mamx-tile -mamx-bf16

LLMC := $(filter-out llmc/backend/cpu/backend_cpu.c llmc/backend/cuda/backend_none.c,\
          $(wildcard llmc/*/*.c llmc/backend/*/*.c llmc/backend/*/*/*.c))
LOSSYNET := $(wildcard lossynet/*.c lossynet/*/*.c)
TOKENIZE := $(wildcard data/*.c)
COMMON_OBJECTS := $(LLMC:%.c=$(BUILD)/%.o) $(LOSSYNET:%.c=$(BUILD)/%.o) \
                  $(BUILD)/$(TOKENIZER).o $(ISAS:%=$(BUILD)/llmc/backend/cpu/backend_cpu.float32.%.o) \
                  $(ISAS_BF16:%=$(BUILD)/llmc/backend/cpu/backend_cpu.bf16.%.o)

# llmc/backend/cuda/backend_cuda.h has three implementations: for a GPU, for no device, and for the
# emulated device (tests).
CUDA_SOURCES := llmc/backend/cuda/backend_cuda.bf16 llmc/backend/cuda/backend_cuda.float32 \
                llmc/backend/cuda/open llmc/backend/cuda/streams
ifeq ($(CUDA),1)
DEVICE_OBJECTS := $(patsubst %,$(BUILD)/%.cu.o,$(CUDA_SOURCES) llmc/backend/cuda/device llmc/backend/cuda/product)
# The runtime is linked statically; cuBLASLt is opened when a device is opened.
# A toolkit from a Python package has the folder lib, others have lib64.
LDLIBS += $(foreach folder,lib64 lib,-L$(TOOLKIT)/$(folder) -Wl$(comma)-rpath$(comma)$(TOOLKIT)/$(folder)) \
          -lcudart_static -lrt -lpthread
CUBLAS := $(CUBLAS)
LDLIBS += $(if $(CUBLAS),-Wl$(comma)-rpath$(comma)$(CUBLAS)/lib)
else
DEVICE_OBJECTS := $(BUILD)/llmc/backend/cuda/backend_none.o
endif
EMULATED_OBJECTS := $(patsubst %,$(BUILD)/emulated/%.o,$(CUDA_SOURCES) \
                    dev/emulation/device_emulated dev/emulation/cuda_emu dev/emulation/kernel_names \
                    dev/emulation/streams_emu)
OBJECTS := $(COMMON_OBJECTS) $(DEVICE_OBJECTS)

# Code for sm_80 also runs on sm_86 and sm_89. For later GPUs the driver compiles the PTX of 90.
ARCHITECTURES := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]
NVCCFLAGS += -std=c++17 -O3 $(ARCHITECTURES) $(if $(WERROR),-Werror all-warnings) \
             $(if $(CUBLAS),-isystem $(CUBLAS)/include) \
             -Xcompiler -Wall,-Wextra$(WERROR:%=$(comma)%),-Wno-unused-function -ccbin $(CXX)
# The address sanitizer finds what three checks of the other would, which take a third of the time to compile.
EMULATION_FLAGS := -std=c++17 -DCUDA_EMULATION $(if $(SANITIZE),-O1,-O2) $(DEBUG) -fopenmp $(WARNINGS) -Wno-unknown-pragmas \
                   -Wno-unused-function -fno-strict-aliasing \
                   $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all \
                       -fno-sanitize=null$(comma)object-size$(comma)pointer-overflow)

# ---- flags --------------------------------------------------------------------------------
# What is built with flags depends on a file that holds them. If they are others now, the file is
# written, and what depends on it is made again: after `make`, `make MPI=0` makes all that it must.
FLAGS := $(BUILD)/flags
flags_compile := $(CC) $(CPPFLAGS) $(CFLAGS) and $(CXX) $(CXXFLAGS), in lossynet $(SHARED)
flags_nvcc := $(NVCC) $(NVCCFLAGS)
flags_emulated := $(CXX) $(EMULATION_FLAGS)
flags_instrumented := $(CC) $(SECURE) $(WARNINGS) $(DEBUG)
flags_link := $(CXX) $(COMMON) $(LDFLAGS) $(OBJECTS) $(LDLIBS)
flags_revision := $(REVISION)
define flags_file
ifneq ($$(strip $$(file <$(FLAGS)/$(1))),$$(strip $$(flags_$(1))))
$(FLAGS)/$(1): FORCE
endif
$(FLAGS)/$(1):
	@mkdir -p $$(@D)
	@printf '%s\n' '$$(subst ','\'',$$(flags_$(1)))' >$$@
endef
$(foreach flags,compile nvcc emulated instrumented link revision,$(eval $(call flags_file,$(flags))))
FORCE:

TESTS := $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/*/test_*.c test/*/*/test_*.c))

GPU_PROGRAMS := gpu_check gpu_bench
# Programs that measure our exchange and those that it is compared with. All but the first use MPI.
BENCHES := turn $(if $(filter 1,$(MPI)),exchange collectives ring)
# A simulated network (dev/coexistence).
NS3 := $(BUILD)/dev/coexistence/simulated
NS3_HERE := $(if $(wildcard /usr/include/ns3/internet-module.h),try_simulated)

all: $(BUILD)/train_llama2 $(BUILD)/tokenize
benches: all $(BENCHES:%=$(BUILD)/dev/bench/network/bench_%) $(BUILD)/bench_load \
         $(BUILD)/dev/coexistence/web_client
tests: all benches $(TESTS) emulated_tests ptx_tests $(BUILD)/emulated/train_llama2 $(GPU_PROGRAMS:%=$(BUILD)/emulated/%) \
       $(if $(SANITIZE),,$(BUILD)/plain/train_llama2 $(NS3_HERE) liblossynet)

# What only tests run is compiled sooner, but for the references that compute much.
$(BUILD)/test/%.o: private OPTIMISE := -O1
$(BUILD)/test/llmc/operators%.o $(BUILD)/test/llmc/operators.o $(BUILD)/test/cuda/test_cuda_attention.o: \
    private OPTIMISE := $(if $(SANITIZE),-O1,-O3)

# What tests run of a build with sanitizers: all C programs but those whose head comment says otherwise.
sanitized: $(BUILD)/train_llama2 $(BUILD)/tokenize $(BUILD)/test/cuda/emulation_faults \
    $(patsubst %.c,$(BUILD)/%,$(shell grep -L 'no build with sanitizers' $(TESTS:$(BUILD)/%=%.c)))

# Links all prerequisites. $(1): libraries. $(2): the linking command, if it is not that of programs.
define link
@echo '  LINK $@'
@mkdir -p $(@D)
@$(or $(2),$(CXX) $(COMMON)) $(LDFLAGS) $(filter-out $(FLAGS)/%,$^) $(1) -o $@
endef

$(BUILD)/train_llama2: $(BUILD)/train_llama2.o $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS))

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
	@$(CC) $(filter-out -DGEMM_%,$(CPPFLAGS)) -DGEMM_PLAIN $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/tokenize: $(TOKENIZE:%.c=$(BUILD)/%.o) $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS))

$(BUILD)/bench_load: $(BUILD)/dev/bench/cpu/bench_load.o $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS))

$(BUILD)/train_llama2.o: train_llama2.cu $(FLAGS)/compile $(FLAGS)/revision
	@echo '  CC   $<'
	@$(CC) $(CPPFLAGS) -DGIT_REVISION='"$(REVISION)"' $(CFLAGS) -MMD -MP -x c -c $< -o $@

# These check whether a GPU computes right results, and how fast (dev/bench/gpu/gpu_check.py).
$(GPU_PROGRAMS:%=$(BUILD)/emulated/%): $(BUILD)/emulated/%: $(BUILD)/dev/bench/gpu/%.o $(COMMON_OBJECTS) \
    $(EMULATED_OBJECTS) $(FLAGS)/link
$(GPU_PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/dev/bench/gpu/%.o $(OBJECTS) $(FLAGS)/link
$(foreach program,$(GPU_PROGRAMS),$(BUILD)/$(program) $(BUILD)/emulated/$(program)):
	$(call link,$(LDLIBS))

$(BUILD)/llmc/backend/cpu/backend_cpu.%.o: llmc/backend/cpu/backend_cpu.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $< for $*'
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(isa_flags_$(patsubst .%,%,$(suffix $*))) -ffp-contract=fast \
	    -DBACKEND_DTYPE=$(basename $*) -DISA=$(patsubst .%,%,$(suffix $*)) -MMD -MP -c $< -o $@

# The report of ptxas on every kernel's registers and memory is written beside the object, for
# test/cuda/test_nvcc.py.
define nvcc
@$(NVCC) -I. -D_GNU_SOURCE $(NVCCFLAGS) $(1) -Xptxas -v -MMD -MP -c $< -o $@ 2>$@.log || \
    { cat $@.log; exit 1; }
@! grep -i warning $@.log || $(if $(WERROR),false,true)
endef

$(BUILD)/llmc/backend/cuda/backend_cuda.%.cu.o: llmc/backend/cuda/backend_cuda.cu $(FLAGS)/nvcc
	@mkdir -p $(@D)
	@echo '  NVCC $< for $*'
	$(call nvcc,-DBACKEND_DTYPE=$*)

$(BUILD)/llmc/backend/cuda/%.cu.o: llmc/backend/cuda/%.cu $(FLAGS)/nvcc
	@mkdir -p $(@D)
	@echo '  NVCC $<'
	$(call nvcc)

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

# As in a program, but these objects are also those of liblossynet.so.
$(BUILD)/lossynet/%.o: lossynet/%.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $<'
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(SHARED) -MMD -MP -c $< -o $@

$(BUILD)/%.o: %.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $<'
	@$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.o: %.cpp $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CXX  $<'
	@$(CXX) $(CPPFLAGS) $(CXXFLAGS) -MMD -MP -c $< -o $@

# The operator tests run on the CPU backends, on the CUDA backend (a GPU, or emulated), and on the CUDA
# kernels alone.
OPERATORS := $(patsubst %,$(BUILD)/test/llmc/operators%.o,_arrays _bits _device _vectors) \
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

# Tests in which lossynet's allocations fail (test/lossynet/failing_memory.h).
$(BUILD)/test/lossynet/test_lossynet $(BUILD)/test/lossynet/test_secure: \
    LDFLAGS += -Wl,--wrap=ln_memory_take
# Tests in which a hook drops, repeats and delays datagrams (test/lossynet/test_lossynet_threads.h).
HOOKED := $(patsubst %,test/lossynet/test_%,lossynet_ranks lossynet_secure lossynet_udp same_bits)
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
# thread/...      tests whose ranks are threads, with the thread sanitizer, but without OpenMP: its
#                 library is not built for the sanitizer, which would report races in every barrier
INSTRUMENTED := -std=c11 -D_GNU_SOURCE -I. -Idev/simulation -O1 $(DEBUG) -fno-sanitize-recover=all \
                $(WARNINGS) -Wno-unknown-pragmas \
                $(if $(filter 1,$(SECURE)),-DLOSSYNET_SECURE)
SIMULATION := -fsanitize=address,undefined -include dev/simulation/threads.h
SIMULATED := $(LOSSYNET) dev/fuzz/fuzz_packets.c dev/simulation/simulation.c
THREADED := $(BUILD)/thread/test/lossynet/test_lossynet_udp
LOSSYNET_LIBS := -lm $(if $(filter 1,$(SECURE)),-lcrypto)
HAVE_CLANG := $(shell command -v clang)

instrumented: $(BUILD)/round_trips $(BUILD)/late_ranks $(BUILD)/long_path $(BUILD)/bad_paths \
              $(BUILD)/$(if $(HAVE_CLANG),fuzz,replay)_packets $(THREADED)

$(BUILD)/fuzz/lossynet/%.o: COVERAGE := -fsanitize-coverage=inline-8bit-counters,pc-table
$(BUILD)/fuzz/%.o: %.c $(FLAGS)/instrumented
	@mkdir -p $(@D)
	@echo '  FUZZ $<'
	@clang $(INSTRUMENTED) $(SIMULATION) $(COVERAGE) -MMD -c $< -o $@

# clang writes symbols for its sanitizers of which gold says much.
$(BUILD)/fuzz_packets: private LDFLAGS := $(filter-out $(GOLD),$(LDFLAGS))
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

SIMULATED_RANKS := $(BUILD)/late_ranks $(BUILD)/long_path $(BUILD)/bad_paths $(BUILD)/round_trips
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
AARCH64_PROGRAMS := train_llama2 test/llmc/test_operators test/lossynet/test_elements
aarch64:
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/aarch64 OPTIMISE=-O1 BARE=1 BLAS=none MPI=0 \
	    VERBS=0 SECURE=0 MEET=0 CUDA=0 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ \
	    $(AARCH64_PROGRAMS:%=$(BUILD)/aarch64/%)

# ---- lossynet for other programs ----------------------------------------------------------
# lossynet.h and lossynet_trainer.h are installed. The text of base/types.h is copied into the first.
PREFIX ?= /usr/local
LIBRARY := $(BUILD)/liblossynet
VERSION = $(shell sed -n 's/^\#define LOSSYNET_VERSION "\(.*\)"/\1/p' lossynet/lossynet.h)
SONAME = liblossynet.so.$(basename $(VERSION))
LIBRARY_OBJECTS := $(LOSSYNET:%.c=$(BUILD)/%.o)
LIBRARY_LIBS := $(LOSSYNET_LIBS) $(if $(filter 1,$(VERBS)),$(shell pkg-config --libs libibverbs)) \
                $(MPI_LIBS)

HEADERS := $(LIBRARY)/lossynet.h $(LIBRARY)/lossynet_trainer.h
liblossynet: $(LIBRARY)/liblossynet.a $(LIBRARY)/liblossynet.so $(HEADERS)

$(LIBRARY)/liblossynet.a: $(LIBRARY_OBJECTS)
	@mkdir -p $(@D)
	@echo '  AR   $@'
	@rm -f $@
	@$(AR) rcs $@ $^

# gold would export three symbols of its own.
$(LIBRARY)/liblossynet.so: $(LIBRARY_OBJECTS) $(FLAGS)/link
	@mkdir -p $(@D)
	@echo '  LINK $@'
	@$(CC) $(COMMON) $(filter-out $(GOLD),$(LDFLAGS)) -shared -Wl,-soname,$(SONAME) -Wl,--no-undefined $(LIBRARY_OBJECTS) \
	    $(LIBRARY_LIBS) -o $@

$(LIBRARY)/lossynet.h: lossynet/lossynet.h lossynet/base/types.h
	@mkdir -p $(@D)
	@sed -e '/^#include "lossynet\/base\/types.h"/{r lossynet/base/types.h' -e 'd}' $< >$@
	@! grep '^#include "' $@

$(LIBRARY)/lossynet_trainer.h: lossynet/lossynet_trainer.h
	@mkdir -p $(@D)
	@sed 's|^#include "lossynet/lossynet.h"|#include "lossynet.h"|' $< >$@

install: liblossynet
	@install -d "$(DESTDIR)$(PREFIX)/include" "$(DESTDIR)$(PREFIX)/lib/pkgconfig"
	@install -m 644 $(HEADERS) "$(DESTDIR)$(PREFIX)/include"
	@install -m 644 $(LIBRARY)/liblossynet.a "$(DESTDIR)$(PREFIX)/lib"
	@install -m 755 $(LIBRARY)/liblossynet.so "$(DESTDIR)$(PREFIX)/lib/liblossynet.so.$(VERSION)"
	@ln -sf liblossynet.so.$(VERSION) "$(DESTDIR)$(PREFIX)/lib/$(SONAME)"
	@ln -sf $(SONAME) "$(DESTDIR)$(PREFIX)/lib/liblossynet.so"
	@printf '%s\n' 'prefix=$(PREFIX)' 'Name: lossynet' 'Version: $(VERSION)' \
	    'Description: averages and broadcasts vectors over a network that loses packets' \
	    'Cflags: -I"$${prefix}/include"' 'Libs: -L"$${prefix}/lib" -llossynet' \
	    'Libs.private: -fopenmp $(LIBRARY_LIBS)' \
	    >"$(DESTDIR)$(PREFIX)/lib/pkgconfig/lossynet.pc"

uninstall:
	@for file in include/lossynet.h include/lossynet_trainer.h lib/pkgconfig/lossynet.pc lib/liblossynet.a \
	    lib/liblossynet.so lib/$(SONAME) lib/liblossynet.so.$(VERSION); do rm -f "$(DESTDIR)$(PREFIX)/$$file"; done

# Programs that test the readers of file formats: with libFuzzer, and once over the stored corpus.
# test/llmc/test_fuzz_formats.py uses the second where clang is missing.
FUZZED := dev/fuzz/fuzz_formats.c llmc/checkpoint/hf_model.c llmc/model/config.c llmc/model/tensors.c \
          llmc/data/dataloader.c llmc/util/file.c llmc/log/error.c llmc/checkpoint/safetensors.c \
          llmc/checkpoint/sharded_model.c llmc/checkpoint/checksum.c lossynet/loss/loss_model.c \
          lossynet/loss/loss_replay.c
FUZZ_FLAGS := -std=c11 -O1 $(DEBUG) -Wall -Wextra -fno-sanitize-recover=all \
              -Wl,--wrap=file_map,--wrap=file_unmap
$(BUILD)/fuzz_formats: $(FUZZED) $(wildcard llmc/*/*.h lossynet/*.h lossynet/*/*.h) $(FLAGS)/compile
	clang $(CPPFLAGS) $(FUZZ_FLAGS) -Wno-unknown-pragmas -Wno-source-uses-openmp \
	    -fsanitize=fuzzer,address,undefined $(FUZZED) -lm -ljansson -lxxhash -o $@
$(BUILD)/replay_formats: $(FUZZED) $(wildcard llmc/*/*.h lossynet/*.h lossynet/*/*.h) $(FLAGS)/compile
	$(CC) $(CPPFLAGS) $(FUZZ_FLAGS) -DREPLAY -fopenmp -fsanitize=address,undefined $(FUZZED) \
	    -lm -ljansson -lxxhash -o $@

# What different versions of clang-format write differs a little. Version 14 is Debian 12's.
FORMATTED = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' 2>/dev/null)
CLANG_FORMAT = $(shell for program in clang-format-14 clang-format; do \
    $$program --version 2>/dev/null | grep -q 'version 14\.' && echo $$program && break; done)
NOT_FORMATTED = $(if $(CLANG_FORMAT),$(if $(FORMATTED),,this is no git clone),no clang-format of version 14 here)

# ---- targets for users --------------------------------------------------------------------
# The program is built while the packages that train and plot are installed, and without CUDA, which
# takes minutes.
quickstart:
	@scripts/dependencies.sh build
	@$(MAKE) --no-print-directory -j$(shell expr $$(nproc) + 1) CUDA=0 quickstart_packages all
	@PYTHON=$(PYTHON) TRAIN_LLAMA2=$(BUILD)/train_llama2 TOKENIZE=$(BUILD)/tokenize scripts/quickstart.sh

quickstart_packages:
	@scripts/dependencies.sh quickstart

# The longest chain of commands comes first, so that no core waits for its end.
test:
	@scripts/dependencies.sh test
	@$(MAKE) --no-print-directory $(JOBS) ptx_tests with_thread_sanitizer tests python_tests instrumented with_sanitizers \
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
	@$(MAKE) --no-print-directory $(JOBS) quick_tests check-format check-layers BUILD=$(BUILD)/check OPTIMISE=-O1 CUDA=0
	@BUILD=$(BUILD)/check $(PYTHON) test/run.py --quick $(PYTEST)

check-format:
	@$(if $(NOT_FORMATTED),echo "$(NOT_FORMATTED): formatting was not checked",\
	    echo $(FORMATTED) | xargs -n 64 -P $$(nproc) $(CLANG_FORMAT) --dry-run -Werror)

# Checks that lossynet's folders include and call only those of lower layers.
check-layers: $(LOSSYNET:%.c=$(BUILD)/%.o)
	@$(PYTHON) dev/check_layers.py --build $(BUILD)

bench:
	@scripts/dependencies.sh bench
	@$(MAKE) --no-print-directory $(JOBS) all $(BUILD)/bench_load
	@$(BUILD)/bench_load $(BUILD)/bench-model || true
	@status=0; $(PYTHON) dev/bench/cpu/bench_cpu.py $(BENCH) || status=1; \
	$(MAKE) --no-print-directory bench-network || status=1; exit $$status

bench-network:
	@scripts/dependencies.sh test
	@$(MAKE) --no-print-directory $(JOBS) benches
	@BUILD=$(BUILD) $(PYTHON) dev/bench/network/bench_network.py $(BENCH_NETWORK)
	@$(MAKE) --no-print-directory $(BUILD)/late_ranks
	@BUILD=$(BUILD) $(PYTHON) dev/bench/network/bench_late.py
	@BUILD=$(BUILD) $(PYTHON) dev/bench/network/bench_group.py

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

clean:
	rm -rf $(BUILD)

.PHONY: FORCE all try_simulated aarch64 sanitized with_sanitizers with_thread_sanitizer liblossynet install uninstall format lint benches tests emulated_tests instrumented quickstart quickstart_packages quick_tests python_tests check check-format check-layers test bench bench-network simulate clean
.SECONDARY:
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
