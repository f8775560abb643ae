# make              build/train_llama2 and build/tokenize
# make quickstart   installs what is missing, trains with and without packet loss, shows what it cost
# make check        formatting, layers and the quick tests, in a minute; run it before a commit
# make test         installs what is missing, runs everything in test/
# make bench        compares speed and memory with PyTorch, and the network with TCP (bench-network)
# make install      copies the programs, their manual pages, the library, its headers and lossynet.pc to
#                   PREFIX=/usr/local below DESTDIR; make uninstall removes them
# make liblossynet  the library alone, static and shared
# make dist         an archive of the committed sources, which builds without git
# make wheel        the package for Python, as a wheel and as an archive of its sources
# make clean        removes build/ (out/ stays)
# lossynet/library.mk and scripts/install.mk have the library and the installation, dev/dev.mk what developers need.
#
# CC, CXX, CPPFLAGS, CFLAGS, CXXFLAGS, LDFLAGS and LDLIBS are added to what the program needs, and win. The Makefile
# finds these libraries, and NAME=0 builds without one: MPI (mpicc; MPI=0), libibverbs (for --link verbs; VERBS=0),
# OpenSSL (for --encrypt; SECURE=0), libcurl (for --meet; MEET=0), CUDA (nvcc; CUDA=0). Matrix products come from
# oneDNN (on x86-64) or OpenBLAS (elsewhere, or with BLAS=openblas); BLAS=none takes plain loops. BARE=1 is for GPU
# machines without Jansson, xxHash, SentencePiece, cmocka and libcurl: dev/bare replaces them, so there is no
# tokenizer. Jansson and xxHash are linked statically where this machine has them; where it has not, or with STATIC=,
# there is no JSON (no logs, no checkpoints). WERROR=-Werror makes warnings errors, as make check and make test do.
# SANITIZE=address,undefined builds with sanitizers. With other flags than before, make builds again what depends on
# them; a BUILD of its own keeps both.

# Without this, make would try to build the .d files below by its built-in rules.
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := all
comma := ,

BUILD ?= build
ifeq ($(origin CC),default)
CC := gcc
endif
JOBS := -j$(shell nproc)
WERROR ?=
WARNINGS := -Wall -Wextra $(WERROR)
OPTIMISE ?= -O3 -fno-math-errno -fno-trapping-math
# Functions and lines, for backtraces and profiles. DEBUG=-g adds local variables, and compiles for a third longer.
DEBUG ?= -g1
override CPPFLAGS := -I. -D_GNU_SOURCE $(CPPFLAGS)
# The distribution's Python, because the Python packages are Debian's.
PYTHON ?= /usr/bin/python3
COMMON = $(OPTIMISE) $(DEBUG) -fopenmp $(WARNINGS) $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all)
C_FLAGS = -std=c11 $(COMMON) $(CFLAGS)
SHARED := -fPIC -fvisibility=hidden -fno-semantic-interposition
CXX_FLAGS = -std=c++17 $(COMMON) $(CXXFLAGS)
override LDLIBS := $(LDLIBS) -lm -ldl -lresolv

# ---- libraries, each with its switch ------------------------------------------------------
# Open MPI's mpicc prints its flags with -showme; MPICH's prints a whole command, whose first word is the compiler.
MPI ?= $(if $(shell command -v mpicc),1)
mpi_flags = $(shell mpicc -showme:$(1) 2>/dev/null || mpicc -$(1)_info 2>/dev/null | cut -d ' ' -f 2-)
ifeq ($(MPI),1)
MPI_LIBS := $(call mpi_flags,link)
override CPPFLAGS += -DLOSSYNET_MPI $(call mpi_flags,compile)
override LDLIBS += $(MPI_LIBS)
endif
SECURE ?= $(if $(shell pkg-config --exists 'libcrypto >= 3' 2>/dev/null && echo yes),1)
ifeq ($(SECURE),1)
override CPPFLAGS += -DLOSSYNET_SECURE
override LDLIBS += -lcrypto
endif
VERBS ?= $(if $(shell pkg-config --exists libibverbs 2>/dev/null && echo yes),1)
ifeq ($(VERBS),1)
override CPPFLAGS += -DLOSSYNET_VERBS $(shell pkg-config --cflags libibverbs)
override LDLIBS += $(shell pkg-config --libs libibverbs)
endif
MEET ?= $(if $(filter 1,$(BARE)),,$(if $(shell pkg-config --exists libcurl 2>/dev/null && echo yes),1))
ifeq ($(MEET),1)
# The program opens libcurl when --meet asks for it (etcd.c).
override CPPFLAGS += -DLLMC_MEET $(shell pkg-config --cflags libcurl)
endif
# Of the compiler, which may be a cross compiler: CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++.
ARCHITECTURE := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null)))
BLAS ?= $(if $(filter x86_64,$(ARCHITECTURE)),onednn,openblas)
ifeq ($(BLAS),onednn)
override CPPFLAGS += -DGEMM_ONEDNN
override LDLIBS += -ldnnl
else ifeq ($(BLAS),none)
override CPPFLAGS += -DGEMM_PLAIN
else
override LDLIBS += -lopenblas
endif
ifeq ($(BARE),1)
STATIC ?= $(filter 2,$(words $(filter /%,$(shell for l in jansson xxhash; do $(CC) -print-file-name=lib$$l.a; done))))
override CPPFLAGS += $(if $(STATIC),-idirafter ,-I)dev/bare
override LDLIBS += $(if $(STATIC),-l:libjansson.a -l:libxxhash.a)
WARNINGS += -Wno-maybe-uninitialized
TOKENIZER := dev/bare/bare
else
# Since SentencePiece 0.2.1 its headers call Abseil.
override LDLIBS += -ljansson -lxxhash -lsentencepiece $(shell pkg-config --atleast-version=0.2.1 sentencepiece 2>/dev/null && \
          pkg-config --libs absl_status 2>/dev/null)
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

# git archive writes the revision into .revision.
REVISION := $(shell git describe --always --dirty 2>/dev/null || grep -v Format .revision || echo unknown)

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
LOSSYNET := $(wildcard lossynet/*.c lossynet/*/*.c lossynet/*/*/*.c)
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
override LDLIBS += $(foreach folder,lib64 lib,-L$(TOOLKIT)/$(folder) -Wl$(comma)-rpath$(comma)$(TOOLKIT)/$(folder)) \
          -lcudart_static -lrt -lpthread
CUBLAS := $(CUBLAS)
override LDLIBS += $(if $(CUBLAS),-Wl$(comma)-rpath$(comma)$(CUBLAS)/lib)
else
DEVICE_OBJECTS := $(BUILD)/llmc/backend/cuda/backend_none.o
endif
OBJECTS := $(COMMON_OBJECTS) $(DEVICE_OBJECTS)

# Code for sm_80 also runs on sm_86 and sm_89. For later GPUs the driver compiles the PTX of 90.
ARCHITECTURES := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]
NVCCFLAGS += -std=c++17 -O3 $(ARCHITECTURES) $(if $(CUBLAS),-isystem $(CUBLAS)/include) \
             -Xcompiler -Wall,-Wextra,-Wno-unused-function -ccbin $(CXX)

# ---- flags --------------------------------------------------------------------------------
# What is built with flags depends on a file that holds them. If they are others now, the file is
# written, and what depends on it is made again: after `make`, `make MPI=0` makes all that it must. (-Werror
# changes no object.)
FLAGS := $(BUILD)/flags
flags_compile := $(filter-out -Werror,$(CC) $(CPPFLAGS) $(C_FLAGS) and $(CXX) $(CXX_FLAGS), in lossynet $(SHARED))
flags_nvcc := $(NVCC) $(NVCCFLAGS)
flags_link := $(filter-out -Werror,$(CXX) $(COMMON)) $(LDFLAGS) $(OBJECTS) $(LDLIBS)
flags_revision := $(REVISION)
define flags_file
ifneq ($$(strip $$(file <$(FLAGS)/$(1))),$$(strip $$(flags_$(1))))
$(FLAGS)/$(1): FORCE
endif
$(FLAGS)/$(1):
	@mkdir -p $$(@D)
	@printf '%s\n' '$$(subst ','\'',$$(flags_$(1)))' >$$@
endef
$(foreach flags,compile nvcc link revision,$(eval $(call flags_file,$(flags))))
FORCE:

# ---- programs ----------------------------------------------------------------------------
all: $(BUILD)/train_llama2 $(BUILD)/tokenize

# Links all prerequisites, and replaces the program at once, so that whoever starts it meanwhile gets the old one or the new.
# $(1): libraries. $(2): the linking command, if it is not that of programs.
define link
@echo '  LINK $@'
@mkdir -p $(@D)
@$(or $(2),$(CXX) $(COMMON)) $(LDFLAGS) $(filter-out $(FLAGS)/%,$^) $(1) -o $@.new && mv -f $@.new $@
endef

$(BUILD)/train_llama2: $(BUILD)/train_llama2.o $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS))

$(BUILD)/tokenize: $(TOKENIZE:%.c=$(BUILD)/%.o) $(OBJECTS) $(FLAGS)/link
	$(call link,$(LDLIBS))

$(BUILD)/train_llama2.o: train_llama2.cu $(FLAGS)/compile $(FLAGS)/revision
	@echo '  CC   $<'
	@$(CC) $(CPPFLAGS) -DGIT_REVISION='"$(REVISION)"' $(C_FLAGS) -MMD -MP -x c -c $< -o $@

$(BUILD)/llmc/backend/cpu/backend_cpu.%.o: llmc/backend/cpu/backend_cpu.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $< for $*'
	@$(CC) $(CPPFLAGS) $(C_FLAGS) $(isa_flags_$(patsubst .%,%,$(suffix $*))) -ffp-contract=fast \
	    -DBACKEND_DTYPE=$(basename $*) -DISA=$(patsubst .%,%,$(suffix $*)) -MMD -MP -c $< -o $@

# The report of ptxas on every kernel's registers and memory is written beside the object, for
# test/cuda/test_nvcc.py.
define nvcc
@$(NVCC) -I. -D_GNU_SOURCE $(NVCCFLAGS) $(if $(WERROR),-Werror all-warnings) $(1) -Xptxas -v -MMD -MP -c $< -o $@ 2>$@.log || \
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

# As in a program, but these objects are also those of liblossynet.so.
$(BUILD)/lossynet/%.o: lossynet/%.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $<'
	@$(CC) $(CPPFLAGS) $(C_FLAGS) $(SHARED) -MMD -MP -c $< -o $@

$(BUILD)/%.o: %.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $<'
	@$(CC) $(CPPFLAGS) $(C_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.o: %.cpp $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CXX  $<'
	@$(CXX) $(CPPFLAGS) $(CXX_FLAGS) -MMD -MP -c $< -o $@

# ---- targets for users --------------------------------------------------------------------
# The program is built while the packages that train and plot are installed, and without CUDA, which
# takes minutes.
quickstart:
	@scripts/dependencies.sh build
	@$(MAKE) --no-print-directory -j$(shell expr $$(nproc) + 1) CUDA=0 quickstart_packages all
	@PYTHON=$(PYTHON) TRAIN_LLAMA2=$(BUILD)/train_llama2 TOKENIZE=$(BUILD)/tokenize scripts/quickstart.sh

quickstart_packages:
	@scripts/dependencies.sh quickstart

clean:
	rm -rf $(BUILD)

.PHONY: FORCE all quickstart quickstart_packages clean
.SECONDARY:
# A copy of some of the sources builds what it has.
-include lossynet/library.mk scripts/install.mk dev/dev.mk
-include $(shell find $(BUILD) -type f -name '*.d' 2>/dev/null)
