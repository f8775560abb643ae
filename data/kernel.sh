#!/bin/sh
# kernel.sh — makes training data of the C files of the Linux kernel, from
# Debian's package linux-source.
#
#     data/kernel.sh DIRECTORY [VOCABULARY]
#
# makes these files in DIRECTORY (default vocabulary: 4096):
#
#     train.txt          210 MB: whole files, in the order of a hash of names
#     val.txt            4 MB of other files
#     tokenizer.model    SentencePiece BPE, trained on the first 30 MB of
#                        train.txt (train_tokenizer.sh)
#     kernel_train.bin   llm.c token files: of Linux 6.1, 98 million tokens
#     kernel_val.bin
#
# It does nothing if they exist, are newer than this script and have the same
# vocabulary. The package need not be installed: the script downloads it (140
# MB) and unpacks it, which needs no root, 2 GB of disk and some ten minutes.
# KERNEL=FILE names another archive, MEGABYTES=N makes a shorter text,
# TOKENIZE=FILE names another tokenize. Needs the packages sentencepiece,
# python3 and xz-utils.
set -eu
case ${1-} in
-h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
-*) set -- ;; # no such option: the usage
esac

fail() { echo "kernel.sh: $1" >&2; exit "${2-1}"; }

here=$(cd "$(dirname "$0")" && pwd)
tokenize=${TOKENIZE:-$here/../build/tokenize}
[ $# -eq 1 ] || [ $# -eq 2 ] || fail "usage: data/kernel.sh DIRECTORY [VOCABULARY]" 2
directory=$1
vocabulary=${2-4096}
megabytes=${MEGABYTES-210}
case $megabytes in '' | . | *[!0-9.]* | *.*.*) fail "MEGABYTES is '$megabytes', expected a number" 2 ;; esac
[ "$vocabulary" -ge 400 ] 2>/dev/null && [ "$vocabulary" -le 32000 ] ||
    fail "the vocabulary is '$vocabulary', expected 400 to 32000" 2
[ -x "$tokenize" ] || fail "'$tokenize' is missing; build it with make"
command -v xz >/dev/null || fail "xz is missing: install the package xz-utils"

# ---- is there anything to do? ---------------------------------------------------------------
stamp=$directory/.kernel
fresh() {
    [ "$(cat "$stamp" 2>/dev/null)" = "$vocabulary $megabytes" ] || return 1
    for file in train.txt val.txt tokenizer.model kernel_train.bin kernel_val.bin; do
        [ -s "$directory/$file" ] || return 1
    done
    [ -z "$(find "$0" -newer "$stamp")" ]
}
if fresh; then exit 0; fi
mkdir -p "$directory"
rm -f "$stamp"
work=$directory/.kernel-work.$$
mkdir "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# ---- the archive ----------------------------------------------------------------------------
archive=${KERNEL-}
if [ -z "$archive" ]; then
    package=$(apt-cache depends linux-source 2>/dev/null | sed -n 's/^ *Depends: *\(linux-source-[0-9.]*\)$/\1/p')
    [ -n "$package" ] || fail "this system knows no package linux-source; name an archive with KERNEL=FILE"
    (cd "$work" && apt-get -q download "$package" >log 2>&1 && dpkg-deb -x "$package"_*.deb .) || {
        cat "$work/log" >&2
        fail "cannot fetch the package $package; run apt-get update, or name an archive with KERNEL=FILE"
    }
    archive=$work/usr/src/$package.tar.xz
fi
mkdir "$work/source"
tar -C "$work/source" --wildcards -xf "$archive" '*.c' || fail "cannot read C files of '$archive'"

# ---- text: files that are plain UTF-8, none very long, without generated tables ----------------
python3 - "$work" "$megabytes" <<'END' || fail "'$archive' has too few C files"
import hashlib
import os
import sys

work, most = sys.argv[1], float(sys.argv[2]) * 1e6
source = os.path.join(work, "source")
paths = [os.path.relpath(os.path.join(folder, name), source) for folder, _, names in os.walk(source) for name in names]
paths.sort(key=lambda path: hashlib.sha256(path.encode()).hexdigest())
written = {"train": 0, "val": 0}
with open(os.path.join(work, "train.txt"), "wb") as train, open(os.path.join(work, "val.txt"), "wb") as val:
    for number, path in enumerate(paths):
        path = os.path.join(source, path)
        if os.path.islink(path) or os.path.getsize(path) > 400_000:
            continue
        with open(path, "rb") as file:
            text = file.read().strip()
        try:
            lines = text.decode("utf8").split("\n")
        except UnicodeDecodeError:
            continue
        if not text or b"\0" in text or max(map(len, lines)) > 4000:
            continue
        part = "val" if number % 50 == 49 else "train"
        (val if part == "val" else train).write(text + b"\n\n")
        written[part] += len(text)
        if written["train"] > most:
            break
sys.exit(not all(written.values()))
END

# ---- tokenizer and token files ---------------------------------------------------------------
mkdir "$work/first"
head -c 30000000 "$work/train.txt" | LC_ALL=C sed '$d' >"$work/first/text"
"$here/train_tokenizer.sh" "$work/first/text" "$vocabulary"
mv "$work/first/tokenizer.model" "$work/tokenizer.model"
for part in train val; do
    "$tokenize" --tokenizer "$work/tokenizer.model" --input "$work/$part.txt" \
        --train "$work/kernel_$part.bin" >>"$work/tokens"
done
for file in train.txt val.txt tokenizer.model kernel_train.bin kernel_val.bin; do
    mv "$work/$file" "$directory/$file"
done
echo "$vocabulary $megabytes" >"$stamp"
sed "s|^$work/|$directory/|" "$work/tokens"
