#!/bin/sh
# gcide.sh — makes training data of the Collaborative International Dictionary
# of English (Webster's of 1913 and WordNet), from Debian's package dict-gcide.
#
#     data/gcide.sh DIRECTORY [VOCABULARY]
#
# makes these files in DIRECTORY (default vocabulary: 1024):
#
#     train.txt         30 MB: one entry a line, without pronunciation and source
#     val.txt           every 50th entry, which train.txt leaves out
#     tokenizer.model   SentencePiece BPE, trained on train.txt
#                       (train_tokenizer.sh)
#     gcide_train.bin   llm.c token files
#     gcide_val.bin
#
# It does nothing if they exist, are newer than this script and have the same
# vocabulary. The package need not be installed: the script downloads it (14 MB)
# and unpacks it, which needs no root. TOKENIZE=FILE names another tokenize,
# GCIDE=FILE another dictionary. Needs the package sentencepiece.
set -eu
case ${1-} in
-h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
-*) set -- ;; # no such option: the usage
esac

fail() { echo "gcide.sh: $1" >&2; exit "${2-1}"; }

here=$(cd "$(dirname "$0")" && pwd)
tokenize=${TOKENIZE:-$here/../build/tokenize}
[ $# -eq 1 ] || [ $# -eq 2 ] || fail "usage: data/gcide.sh DIRECTORY [VOCABULARY]" 2
directory=$1
vocabulary=${2-1024}
[ -x "$tokenize" ] || fail "'$tokenize' is missing; build it with make"

# ---- is there anything to do? ---------------------------------------------------------------
stamp=$directory/.gcide
fresh() {
    [ "$(cat "$stamp" 2>/dev/null)" = "$vocabulary" ] || return 1
    for file in train.txt val.txt tokenizer.model gcide_train.bin gcide_val.bin; do
        [ -s "$directory/$file" ] || return 1
    done
    [ -z "$(find "$0" -newer "$stamp")" ]
}
if fresh; then exit 0; fi
mkdir -p "$directory"
rm -f "$stamp"
work=$(mktemp -d "$directory/.gcide-work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# ---- the dictionary -------------------------------------------------------------------------
dictionary=${GCIDE:-/usr/share/dictd/gcide.dict.dz}
if [ ! -r "$dictionary" ]; then
    (cd "$work" && apt-get -q download dict-gcide >log 2>&1 && dpkg-deb -x dict-gcide_*.deb .) || {
        cat "$work/log" >&2
        fail "cannot fetch the package dict-gcide; run apt-get update, or install it"
    }
    dictionary=$work/usr/share/dictd/gcide.dict.dz
fi

# ---- text: an entry begins at the margin, its text is indented -------------------------------
zcat "$dictionary" | LC_ALL=C tr -cd '\n -~' | LC_ALL=C awk -v work="$work" '
    function end_entry() {
        gsub(/ \[[^]]*(Webster|WordNet|PJC|Century|Collegiate)[^]]*\]/, "", entry)
        sub(/ \\[^\\]*\\/, "", entry)
        if (++entries > 40) print entry >(work (entries % 50 == 0 ? "/val.txt" : "/train.txt"))
        entry = ""
    }
    /^[^ ]/ { if (entry != "") end_entry(); entry = $0; next }
    { sub(/^ +/, ""); if ($0 != "") entry = entry " " $0 }
    END { end_entry(); if (entries < 100000) exit 1 }' ||
    fail "'$dictionary' has fewer than 100,000 entries"

# ---- tokenizer and token files ---------------------------------------------------------------
"$here/train_tokenizer.sh" "$work/train.txt" "$vocabulary"
for part in train val; do
    "$tokenize" --tokenizer "$work/tokenizer.model" --input "$work/$part.txt" \
        --train "$work/gcide_$part.bin" >>"$work/tokens"
done
for file in train.txt val.txt tokenizer.model gcide_train.bin gcide_val.bin; do
    mv "$work/$file" "$directory/$file"
done
echo "$vocabulary" >"$stamp"
sed "s|^$work/|$directory/|" "$work/tokens"
