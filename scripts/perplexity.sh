#!/bin/sh
# Measures the perplexity of a model in the ways that are usual in publications:
# on the test text of WikiText-2, with context 2048 and 4096, in windows side by
# side and strided.
#
#   scripts/perplexity.sh MODEL [TEXT [OPTION...]]
#
# MODEL is a Hugging Face Llama directory or a checkpoint. It contains
# tokenizer.model, unless TOKENIZER=FILE names another one. TEXT is UTF-8 and
# taken as one document. Without TEXT, or with "-", it is WikiText-2's test text
# with its rows joined by blank lines, which is fetched if data/wikitext-2 does
# not exist. Further arguments go to train_llama2 (--threads 4, --batch 1, ...).
# The variables CONTEXTS="2048 4096" and STRIDE=512 can be set. A context longer
# than the model's is left out, and a message says so.
#
# Both ways are Hugging Face's: a window of `context` tokens begins every
# `stride` tokens and scores the tokens that no earlier window scored. If the
# stride equals the context, windows lie side by side and the first token of
# each is not scored. Perplexity per token depends on the tokenizer. Perplexity
# per word (words are separated by white space) and bits per byte can be
# compared across tokenizers.
set -eu
case ${1-} in
-h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
-*) set -- ;; # no such option: the usage
esac
fail() { echo "perplexity.sh: $1" >&2; exit "${2-1}"; }
[ $# -ge 1 ] || fail "usage: scripts/perplexity.sh MODEL [TEXT [OPTION...]]" 2

here=$(dirname "$0")/..
train_llama2=${TRAIN_LLAMA2:-$here/build/train_llama2}
tokenize=${TOKENIZE:-$here/build/tokenize}
data=${DATA:-$here/data/wikitext-2}
model=$1
text=${2--}
[ $# -lt 2 ] || shift
shift
for option; do
    case ${option%%=*} in
    --model | --val | --seq | --stride | --quiet) fail "$option: expected MODEL, TEXT, CONTEXTS and STRIDE to say it" 2 ;;
    esac
done
tokenizer=${TOKENIZER:-$model/tokenizer.model}
stride=${STRIDE:-512}
case $stride in
'' | *[!0-9]* | 0*) fail "STRIDE is '$stride', expected a positive whole number" 2 ;;
esac
for context in ${CONTEXTS:-2048 4096}; do
    case $context in
    *[!0-9]* | 0*) fail "CONTEXTS has '$context', expected positive whole numbers, such as '2048 4096'" 2 ;;
    esac
done
[ -f "$model/config.json" ] || fail "'$model' is no model directory: it has no config.json"
[ -f "$tokenizer" ] || fail "'$tokenizer' is missing; name the model's tokenizer in TOKENIZER=FILE"
positions=$(sed -n 's/.*"max_position_embeddings" *: *\([0-9]*\).*/\1/p' "$model/config.json")
[ -n "$positions" ] || positions=2048 # what Hugging Face takes then
if [ "$text" = - ]; then
    text=$data/test.joined.txt
    [ -f "$text" ] || "${PYTHON:-/usr/bin/python3}" "$here/data/fetch.py" wikitext-2 "$data" >&2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
"$tokenize" --tokenizer "$tokenizer" --input "$text" --train "$work/text.bin" >"$work/log"
echo "$model on $text: $(sed -n 's/^[^:]*: \(.*\), vocabulary.*/\1/p;q' "$work/log")"
printf '%8s %8s %9s %12s %16s %14s\n' context stride scored 'per token' 'per word' 'bits per byte'
measured=
for context in ${CONTEXTS:-2048 4096}; do
    if [ "$context" -gt "$positions" ]; then
        printf '%8s  left out: the model takes at most %s tokens\n' "$context" "$positions"
        continue
    fi
    measured=1
    for step in "$context" "$stride"; do
        [ "$step" -le "$context" ] || continue
        line=$("$train_llama2" --eval --model "$model" --val "$work/text.bin" --batch 1 \
            --seq "$context" --stride "$step" "$@")
        # loss L  perplexity P  tokens N  word perplexity W  bits per byte B
        echo "$line" | awk -v c="$context" -v s="$step" '$1 == "loss" {
            printf "%8s %8s %9s %12s %16s %14s\n", c, s, $6, $4, $9, $13 }'
    done
done
[ -n "$measured" ] || fail "nothing was measured: expected CONTEXTS of at most $positions, such as CONTEXTS=$positions"
