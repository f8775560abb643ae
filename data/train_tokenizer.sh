#!/bin/sh
# train_tokenizer.sh — trains a SentencePiece tokenizer on a text, with
# Llama-2's settings.
#
#     data/train_tokenizer.sh TEXT VOCABULARY
#
# writes tokenizer.model beside TEXT: BPE with byte fallback, so that
# decode(encode(text)) == text. It reads the first 200,000 lines of a text, and
# leaves out those above 64 KB. Needs the package sentencepiece.
set -eu
case ${1-} in
-h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
esac

fail() { echo "train_tokenizer.sh: $1" >&2; exit "${2-1}"; }

[ $# -eq 2 ] || fail "usage: data/train_tokenizer.sh TEXT VOCABULARY" 2
case $2 in
'' | *[!0-9]* | ??????*) fail "the vocabulary is '$2', expected 400 to 32000" 2 ;;
esac
if [ "$2" -lt 400 ] || [ "$2" -gt 32000 ]; then
    fail "the vocabulary is $2, expected 400 to 32000" 2
fi
[ -f "$1" ] && [ -r "$1" ] || fail "cannot read the text '$1'"
command -v spm_train >/dev/null ||
    fail "the program 'spm_train' is missing; install the package sentencepiece"

# The model file contains the file names given here. Relative names make it the same everywhere.
cd "$(dirname "$1")"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
spm_train --input="$(basename "$1")" --model_prefix=tokenizer --model_type=bpe \
    --vocab_size="$2" --byte_fallback=true --character_coverage=1.0 \
    --split_digits=true --allow_whitespace_only_pieces=true --remove_extra_whitespaces=false \
    --normalization_rule_name=identity --add_dummy_prefix=true --max_sentence_length=65536 \
    --unk_id=0 --bos_id=1 --eos_id=2 --pad_id=-1 --num_threads=2 \
    --input_sentence_size=200000 --shuffle_input_sentence=false \
    >"$log" 2>&1 || {
    tail -n 3 "$log" >&2
    fail "spm_train failed with a vocabulary of $2"
}
