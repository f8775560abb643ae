#!/bin/bash
# Trains Llama-2 7B on 64 GPUs over a network that loses packets: prepares the
# data, checks the nodes, trains (and resumes after time limits), and measures
# the perplexity.
#
#   pretrain_7b.sh --prepare --tokenizer FILE      makes the data; needs the
#                                                  internet, once
#   pretrain_7b.sh --hosts FILE                    with mpirun; FILE: lines
#                                                  "NODE slots=8"
#   sbatch scripts/pretrain_7b/pretrain_7b.sbatch  with Slurm, from the
#                                                  repository; the same options
#   pretrain_7b.sh --rehearse                      the same path with a tiny
#                                                  model, here
#
#   --loss P           share of packets lost by injection, in addition to the
#                      network's loss [0.1]
#   --from DIR         start from Hugging Face's Llama-2-7b; default: from
#                      scratch
#   --corpus NAME      c4 or fineweb [c4]
#   --data DIR         its token files: train_*.bin, val*.bin, tokenizer.model
#                      [data/CORPUS]
#   --tokenizer FILE   Llama-2's tokenizer.model, for --prepare
#                      [FROM/tokenizer.model]
#   --files N          files of the corpus, for --prepare [64 of c4, 15 of
#                      fineweb: 10^10 tokens]
#   --out DIR          checkpoints, log, perplexity [out/7b]; all nodes must
#                      share it
#   --ranks N          GPUs [64; in a Slurm job: its tasks]
#   --group N          GPUs of a node that share a replica [8; but 1 with 8 ranks
#                      or fewer, or if their number is no multiple of 8]
#   --steps N          training steps [2400]
#   --link NAME        verbs, udp, mpi or auto: verbs where every rank has an
#                      RDMA port, else udp [auto; in a rehearsal: udp]
#   --interface NAME   interface of that link; one adapter per GPU:
#                      mlx5_0,mlx5_1,...
#   --no-preflight     do not check the nodes first
#   --print            only print the commands
#   -- OPTION...       further options of train_llama2
#
# The same command, called again, continues the run. SIGUSR1 (Slurm sends it
# before the time limit) and SIGTERM end the run with a checkpoint. A Slurm job
# then requeues itself; elsewhere the exit code is 75. Other exit codes: 0:
# trained and evaluated; 1: failed; 2: wrong usage.
#
# What it takes. test/system/test_cluster.py checks the numbers marked = with `train_llama2 --dry-run`.
#
#   tokens per step       = 4194304     64 workers, 8 micro-batches of 2 x 4096
#   memory of a GPU       = 81.431 GB   gradients, and 1/64 of parameters, averages and optimizer
#                                       state in float32; weights in use and activations in bf16; 2.1
#                                       are cuDNN's. An H100 has 85.5 GB, and recomputes nothing. A
#                                       GPU of 80 GB leaves out cuDNN's, one of less recomputes norms
#                                       (69.5 GB); or
#                                       -- --batch 1 --micro-batches 16 takes 62.5 GB
#   memory of its host    = 11.0 GB     per GPU: pinned memory for what is sent and received, namely
#                                       one copy of the parameters per node and three buckets of
#                                       gradients, and the copy of a file of the model that is saved
#                                       (1 GB), which not every rank writes. 8 GPUs: at most 89 GB
#   a checkpoint          = 99.729 GB   model, moments, and at 10% loss 8 replicas' stale packets.
#                                       2 are kept while one is being written: 299 GB
#   sent per GPU and step = 2.948 GB    gradients and parameters, bf16; as much is received. (Without
#                                       groups: 26.5 GB)
#   on the link           = 64 ms       per step at 400 Gbit/s per GPU, or
#                         = 254 ms      at 100 Gbit/s. (Without groups: 573 and 2291)
#   in its threads        = 498 ms      per step: 8 of a GPU pack, send, receive and unpack
#                                       (--link-threads; one would take 4 s). A node has 64 of them
#   a step                = 4.55 s      on H100s by the model of --dry-run, at 400 Gbit/s: 43.7 GFLOP
#                                       per token (6 per parameter, and attention), 62% of the peak; or
#                         = 4.55 s      at 100 Gbit/s. What is sent and copied overlaps with
#                                       computing, but for some 100 ms
#   2400 steps            = 3.0 h       at 400 Gbit/s, or
#                         = 3.0 h       at 100 Gbit/s. No cluster has confirmed these
#
# If the pre-flight measures a lower speed ("in", "out"), the exchange runs at that speed.
set -u -o pipefail

fail() { echo "pretrain_7b.sh: $1" >&2; exit "${2-1}"; }
usage() { sed -n '2,/^# What it takes/{/^# What it takes/d;s/^# \{0,1\}//;p}' "$0"; exit 0; }
say() { printf '\n== %s\n' "$*"; }

# ---- options --------------------------------------------------------------------------------
loss=0.1 from= corpus=c4 data= tokenizer= files= out= ranks= group= steps= link= interface= hosts=
prepare= rehearse= print= preflight=yes
while [ $# -gt 0 ]; do
    case $1 in
    --loss | --from | --corpus | --data | --tokenizer | --files | --out | --ranks | --group | --steps | \
        --link | --interface | --hosts)
        [ "${2-}" ] || fail "$1: expected a value after it (see --help)" 2
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    --prepare | --rehearse | --print) printf -v "${1#--}" yes && shift ;;
    --no-preflight) preflight= && shift ;;
    -h | --help) usage ;;
    --) shift && break ;;
    *) fail "$1: unknown option (see --help; options of train_llama2 follow after --)" 2 ;;
    esac
done
here=$(cd "$(dirname "$0")/../.." && pwd) || exit 1
train_llama2=${TRAIN_LLAMA2:-$here/build/train_llama2}
tokenize=${TOKENIZE:-$here/build/tokenize}
case $loss in
'' | *[!0-9.]* | *.*.*) fail "--loss: expected a number from 0 to 1, got '$loss'" 2 ;;
esac
for number in files ranks group steps; do
    case ${!number} in
    *[!0-9]* | 0*) fail "--$number: expected a whole number, got '${!number}'" 2 ;;
    esac
done
case $corpus in
c4 | fineweb) ;;
*) fail "--corpus: expected c4 or fineweb, got '$corpus'" 2 ;;
esac
[ -z "$hosts" ] || [ -r "$hosts" ] || fail "--hosts: cannot read '$hosts'" 2
job=${SLURM_JOB_ID-}
ranks=${ranks:-${SLURM_NTASKS:-64}}
group=${group:-$((ranks % 8 || ranks == 8 ? 1 : 8))}

if [ "$rehearse" ]; then
    out=${out:-out/rehearsal}
    data=${data:-$out/data}
    link=${link:-udp}
    text=$data/held-out.txt
    steps=${steps:-20}
    export CONTEXTS=${CONTEXTS:-64} STRIDE=${STRIDE:-32} TRAIN_LLAMA2=$train_llama2
    model=(--model "${from:-260K}" --device cpu --wire-dtype bf16 --threads 1 --batch 1 --seq 64
        --micro-batches 2 --steps "$steps" --lr 2e-3 --warmup 4 --save-every 8 --eval-every 10
        --eval-sequences 64 --peer-timeout 60)
    evaluation=(--threads 1)
else
    out=${out:-out/7b}
    data=${data:-data/$corpus}
    link=${link:-auto}
    text=- # WikiText-2's test text
    steps=${steps:-2400}
    # Llama 2 (Touvron et al. 2023), section 2.2, with a shorter warm-up, since the run is shorter. A run
    # that starts from Llama-2's weights has a tenth of the learning rate.
    rate=(--lr 3e-4 --warmup 200)
    [ -z "$from" ] || rate=(--lr 3e-5 --warmup 100)
    model=(--model "${from:-7B}" --device cuda --dtype bf16 --wire-dtype bf16 --link-threads 8
        --batch 2 --seq 4096 --micro-batches 8 --steps "$steps" "${rate[@]}" --beta1 0.9 --beta2 0.95
        --adam-eps 1e-5 --weight-decay 0.1 --clip 1 --save-every 200 --keep 2 --eval-every 200
        --eval-sequences 256)
    evaluation=(--device cuda --dtype bf16)
fi
run=("${model[@]}" --train "$data/train_*.bin" --val "$data/val*.bin" --loss-rate "$loss"
    --link "$link" --group "$group" --out "$out")
[ -z "$interface" ] || run+=(--interface "$interface")
run+=("$@")

# ---- data -----------------------------------------------------------------------------------
prepare_corpus() {
    tokenizer=${tokenizer:-$from/tokenizer.model}
    [ -f "$tokenizer" ] ||
        fail "--prepare: no tokenizer at '$tokenizer'; --tokenizer names Llama-2's" 2
    [ "$corpus" = fineweb ] && files=${files:-15}
    local python=${PYTHON:-/usr/bin/python3} separator=(--separator '<|endoftext|>')
    "$python" "$here/data/fetch.py" "$corpus" "$data" --files "${files:-64}" &&
        "$python" "$here/data/fetch.py" wikitext-2 "$here/data/wikitext-2" || exit 1
    if [ -f "$data/val.txt" ]; then
        "$tokenize" --tokenizer "$tokenizer" "${separator[@]}" --input "$data/val.txt" \
            --train "$data/val.bin" &&
            "$tokenize" --tokenizer "$tokenizer" "${separator[@]}" --input "$data/train.txt" \
                --train "$data/train.bin" --shard-tokens 100000000 || exit 1
    else # a hundredth is held out
        "$tokenize" --tokenizer "$tokenizer" "${separator[@]}" --input "$data/train.txt" \
            --train "$data/train.bin" --val "$data/val.bin" --val-fraction 0.01 \
            --shard-tokens 100000000 || exit 1
    fi
}

prepare_rehearsal() { # the King James Bible
    [ -f "$data/val.bin" ] && [ -f "$text" ] && return
    mkdir -p "$data"
    TOKENIZE=$tokenize "$here/data/kjv.sh" "$data" 512 || exit 1
    ln -sf kjv_train.bin "$data/train_0000.bin"
    ln -sf kjv_val.bin "$data/val.bin"
    tail -c 20000 "$data/kjv.txt" >"$text.partial" && mv "$text.partial" "$text"
}

# ---- launching ------------------------------------------------------------------------------
stopping= child=
forward() {
    stopping=yes
    [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null
}
trap forward USR1 TERM

await() { # COMMAND...: its status, also when signals come meanwhile
    local status
    "$@" &
    child=$!
    while wait "$child"; status=$?; [ $status -gt 128 ] && kill -0 "$child" 2>/dev/null; do :; done
    child=
    return $status
}

# The words before train_llama2, which start one rank per GPU. Ranks are not bound to cores: each takes
# its share of the host's cores itself.
launcher=(mpirun -np "$ranks" --bind-to none)
if [ "$job" ] && srun --mpi=list 2>&1 | grep -q pmix; then
    launcher=(srun --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=none)
elif [ "$hosts" ]; then
    launcher+=(--hostfile "$hosts" -x PATH -x LD_LIBRARY_PATH)
elif [ "$rehearse" ] && [ -z "$job" ]; then
    launcher+=(--oversubscribe --mca mpi_yield_when_idle 1)
    # In containers the user is often root. mpirun may run as root, since it can do no harm here.
    [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
[ -z "${LD_LIBRARY_PATH-}" ] && for i in "${!launcher[@]}"; do
    [ "${launcher[i]}" != LD_LIBRARY_PATH ] || unset "launcher[i-1]" "launcher[i]"
done

if [ "$print" ]; then
    quoted() { printf '%q ' "$@" && echo; }
    [ -z "$preflight" ] || quoted "${launcher[@]}" "$train_llama2" --preflight "${run[@]}"
    quoted "${launcher[@]}" "$train_llama2" --resume auto "${run[@]}"
    quoted "$here/scripts/perplexity.sh" "$out/checkpoint-..." "$text" "${evaluation[@]}"
    exit 0
fi

# ---- what is missing ------------------------------------------------------------------------
missing=
lack() { missing="$missing${missing:+; }$1"; }
[ -x "$train_llama2" ] && [ -x "$tokenize" ] || lack "the program (make)"
if [ -z "$rehearse$prepare" ]; then
    [ "$job$hosts" ] || lack "nodes (--hosts FILE, or sbatch scripts/pretrain_7b/pretrain_7b.sbatch)"
    [ "$hosts" ] || command -v nvidia-smi >/dev/null || lack "GPUs (no nvidia-smi here)"
    ls "$data"/train_*.bin "$data"/val*.bin >/dev/null 2>&1 ||
        lack "token files in $data (--prepare, where the internet is)"
    [ -f "$here/data/wikitext-2/test.joined.txt" ] || lack "WikiText-2 (--prepare)"
fi
[ -z "$from" ] || [ -f "$from/config.json" ] || lack "a Hugging Face model in '$from'"
[ "$prepare" ] || command -v "${launcher[0]}" >/dev/null || lack "${launcher[0]} (Open MPI)"
[ "$rehearse" ] || hint=" - to try all of it on this machine: --rehearse"
[ -z "$missing" ] || fail "missing: $missing${hint-}"

if [ "$prepare" ]; then
    prepare_corpus
    exit 0
fi
[ -z "$rehearse" ] || prepare_rehearsal
mkdir -p "$out" || exit 1

# ---- the run --------------------------------------------------------------------------------
ended() { # how the log says that training ended: complete, stopped, not finite
    tail -n 1 "$out/log.jsonl" 2>/dev/null |
        sed -n 's/.*"event": *"end".*"status": *"\([^"]*\)".*/\1/p'
}

stopped() {
    [ "$stopping" ] || return 0
    if [ "$job" ]; then
        say "Stopped by a signal; job $job is requeued, and goes on from the last checkpoint"
        scontrol requeue "$job" || fail "scontrol requeue $job failed; submit it again to go on"
        exit 0
    fi
    say "Stopped by a signal; the same command goes on from the last checkpoint"
    exit 75
}

if [ "$preflight" ]; then
    say "Looking at the nodes"
    if ! await "${launcher[@]}" "$train_llama2" --preflight "${run[@]}"; then
        stopped
        fail "the pre-flight found something, see above; leave that node out (--hosts, or\
 sbatch --exclude=NODE), or go on all the same with --no-preflight"
    fi
fi
if [ "$(ended)" != complete ] || [ ! -d "$out/checkpoint-$(printf %08d "$steps")" ]; then # it may get more steps
    say "Training"
    await "${launcher[@]}" "$train_llama2" --resume auto "${run[@]}"
    status=$?
    stopped
    [ $status = 0 ] || fail "training ended with exit code $status; its log is $out/log.jsonl"
    if [ "$(ended)" = stopped ]; then # the signal went to the ranks, not to us
        stopping=yes
        stopped
    fi
fi

say "Perplexity"
checkpoint=$(ls -d "$out"/checkpoint-???????? 2>/dev/null | tail -n 1)
[ "$checkpoint" ] || fail "no checkpoint in '$out'"
await "$here/scripts/perplexity.sh" "$checkpoint" "$text" "${evaluation[@]}" >"$out/perplexity.txt"
status=$?
stopped
cat "$out/perplexity.txt"
[ $status = 0 ] || fail "scripts/perplexity.sh ended with exit code $status"
