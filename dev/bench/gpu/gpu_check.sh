#!/usr/bin/env bash
# gpu_check.sh — everything that only a GPU can tell, in one call of at most 8 minutes.
#
#   dev/bench/gpu/gpu_check.sh [DIRECTORY]     what it builds and says goes to DIRECTORY (default build/gpu)
#
# For a machine with an NVIDIA GPU, a driver and CUDA's toolkit, and perhaps nothing else: other
# libraries are done without, also where they are (one that does not fit would cost the whole call),
# and a compiler may warn. Prints one table; exits with 1 when something is wrong. What a machine
# lacks is a row that says "skipped" and why. What is worth most comes first.
set -uo pipefail
cd "$(dirname "$0")/../../.." || exit 1
out=${1:-build/gpu}
mkdir -p "$out" || exit 1
table=$out/table.txt
: >"$table"
began=$SECONDS
limit=470 # seconds in all; what does not fit is said to be skipped
failed=0

row() { printf '| %s | %s | %s |\n' "$1" "$2" "$3" | tee -a "$table"; }
left() { echo $((limit - (SECONDS - began))); }

# check NAME SECONDS COMMAND...: the rows that it prints, and one with its time or its first error.
check() {
    local name=$1 seconds=$2 log status reasons reason start=$SECONDS
    shift 2
    log=$out/$(echo "$name" | tr -c 'a-zA-Z0-9\n' _).log
    if [ "$(left)" -lt 10 ]; then row "$name" "no time left" skipped; return; fi
    [ "$seconds" -lt "$(left)" ] || seconds=$(left)
    timeout "$seconds" "$@" >"$log" 2>&1
    status=$?
    grep '^|' "$log" | tee -a "$table"
    case $status in
    0) row "$name" "$((SECONDS - start)) s" ok ;;
    77) row "$name" "$(tail -n 1 "$log")" skipped ;;
    *)
        failed=1
        reasons=$(grep -v '^[#|]' "$log" | grep -iE 'error|fail|wrong|off by' | head -n 30)
        reason=${reasons%%$'\n'*}
        reason=${reason:0:200}
        row "$name" "exit code $status: ${reason:-$(tail -n 1 "$log")}" WRONG
        echo "$reasons"
        tail -n 20 "$log"
        ;;
    esac
}

# ---- the machine ----
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if ! [ -x "$nvcc" ]; then echo "dev/bench/gpu/gpu_check.sh: no nvcc here: install CUDA's toolkit" >&2; exit 1; fi
gpu=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
row GPU "${gpu:-nvidia-smi found none}" "$("$nvcc" --version | grep -o 'release [0-9.]*')"

# ---- build ----
# As gpu_bench.py builds, which uses what is built here.
options=(CUDA=1 BARE=1 BLAS=none MPI=0 SECURE=0 VERBS=0 WERROR= NVCC="$nvcc" BUILD="$out/build")
[ -z "${MAKE_OPTIONS:-}" ] || { read -ra more <<<"$MAKE_OPTIONS"; options+=("${more[@]}"); }
check "build (${options[*]})" 240 make -j"$(nproc)" "${options[@]}" "$out/build/gpu_check" \
    "$out/build/train_llama2" "$out/build/test/cuda/test_operators_device"
if ! [ -x "$out/build/test/cuda/test_operators_device" ]; then
    echo "dev/bench/gpu/gpu_check.sh: the build failed, see above" >&2
    exit 1
fi

# ---- right ----
check "operators" 120 "$out/build/test/cuda/test_operators_device"
grep -hE '^#   ' "$out/operators.log" | sed 's/^#  */    /' >"$out/errors.txt"
check "parity with the CPU" 90 "$out/build/gpu_check" parity

# ---- fast, and as large as it says ----
check "1.1B" 60 "$out/build/gpu_check" speed 1.1B 0 8 2048 8
check "7B-shaped" 90 "$out/build/gpu_check" speed 7B 0 1 4096 4

# ---- V workers on one GPU, with loss ----
tokens() { # 1 MB of tokens below 32,000, in llm.c's format
    python3 - "$1" <<'PYTHON'
import random, struct, sys
random.seed(1)
tokens = [random.randrange(32000) for _ in range(200000)]
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, len(tokens), 32000, *[0] * 252))
    file.write(struct.pack(f"<{len(tokens)}H", *tokens))
PYTHON
}
if command -v python3 >/dev/null && tokens "$out/tokens.bin"; then
    run=("$out/build/train_llama2" --device cuda --model 42M --train "$out/tokens.bin" --workers 8
        --batch 4 --seq 512 --steps 10 --loss-rate 0.1)
    check "8 workers of 42M, 10% lost" 60 "${run[@]}"
    # This one's vectors travel through pinned memory, where the GPU averages them.
    check "the same, carried over" 60 "${run[@]}" --carry 1
else
    row "8 workers" "no python3 to write tokens with" skipped
fi

# ---- right, to the last byte and barrier ----
sanitizer=$(command -v compute-sanitizer || ls "$(dirname "$nvcc")"/../compute-sanitizer/compute-sanitizer \
    2>/dev/null || ls "$(dirname "$nvcc")/compute-sanitizer" 2>/dev/null)
# The tests ask for more memory than there is: not an error.
for tool in "memcheck --report-api-errors no" racecheck; do
    name="compute-sanitizer ${tool%% *}"
    if [ -n "$sanitizer" ]; then
        # shellcheck disable=SC2086 # words
        OPERATORS_MOST_WORK=10000 check "$name" 120 "$sanitizer" --tool $tool \
            --error-exitcode 3 "$out/build/test/cuda/test_operators_device"
    else
        row "$name" "not installed" skipped
    fi
done

echo
cat "$table"
echo "took $((SECONDS - began)) s; worst errors by operation in $out/errors.txt"
exit $failed
