#!/bin/sh
# kjv.sh — makes training data of the King James Bible, from Debian's package
# bible-kjv.
#
#     data/kjv.sh DIRECTORY [VOCABULARY]
#
# makes these files in DIRECTORY (default vocabulary: 2048):
#
#     kjv.txt           4.2 MB: a line with the book's name, then a paragraph
#                       per chapter
#     tokenizer.model   SentencePiece BPE, trained on kjv.txt (train_tokenizer.sh)
#     kjv_train.bin     llm.c token files: the first 95% of the text
#     kjv_val.bin       and the last 5%, held out
#
# It does nothing if they exist, are newer than this script and build/tokenize,
# and have the same vocabulary. TOKENIZE=FILE names another tokenize. Needs the
# packages bible-kjv and sentencepiece.
set -eu
case ${1-} in
-h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
-*) set -- ;; # no such option: the usage
esac

fail() { echo "kjv.sh: $1" >&2; exit "${2-1}"; }

here=$(dirname "$0")
tokenize=${TOKENIZE:-$here/../build/tokenize}
[ $# -eq 1 ] || [ $# -eq 2 ] || fail "usage: data/kjv.sh DIRECTORY [VOCABULARY]" 2
directory=$1
vocabulary=${2-2048}
command -v bible >/dev/null ||
    fail "the program 'bible' is missing; install the package bible-kjv"
[ -x "$tokenize" ] || fail "'$tokenize' is missing; build it with make"

# ---- is there anything to do? ---------------------------------------------------------------
stamp=$directory/.kjv
fresh() {
    [ "$(cat "$stamp" 2>/dev/null)" = "$vocabulary" ] || return 1
    for file in kjv.txt tokenizer.model kjv_train.bin kjv_val.bin; do
        [ -s "$directory/$file" ] || return 1
    done
    [ -z "$(find "$0" "$tokenize" -newer "$stamp")" ]
}
if fresh; then exit 0; fi
mkdir -p "$directory"
rm -f "$stamp"
work=$(mktemp -d "$directory/.kjv-work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# ---- text: "Ge1:1 In the beginning ..." becomes paragraphs ----------------------------------
names='Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|
2 Kings|1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes|
Song of Solomon|Isaiah|Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|Micah|
Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi|Matthew|Mark|Luke|John|Acts|Romans|
1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|Colossians|1 Thessalonians|
2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|1 John|2 John|
3 John|Jude|Revelation'
bible -f gen1:1-rev22:21 </dev/null | LC_ALL=C awk -v names="$(echo "$names" | tr -d '\n')" '
    BEGIN { if (split(names, name, "|") != 66) exit 1 }
    !match($1, /[0-9]+:[0-9]+$/) { print "kjv.sh: no verse: " $0 >"/dev/stderr"; exit 1 }
    {
        book = substr($1, 1, RSTART - 1)
        chapter = $1
        sub(/:[0-9]+$/, "", chapter)
        if (book != last_book) printf "%s%s", (books++ ? "\n\n" : ""), name[books]
        printf "%s%s", (chapter != last_chapter ? "\n\n" : " "), substr($0, length($1) + 2)
        last_book = book
        last_chapter = chapter
    }
    END { if (books != 66) exit 1; print "" }' >"$work/kjv.txt" ||
    fail "the program 'bible' does not print 66 books with one verse per line"

# ---- tokenizer and token files ---------------------------------------------------------------
"$here/train_tokenizer.sh" "$work/kjv.txt" "$vocabulary"
"$tokenize" --tokenizer "$work/tokenizer.model" --input "$work/kjv.txt" \
    --train "$work/kjv_train.bin" --val "$work/kjv_val.bin" --val-fraction 0.05 >"$work/log"
for file in kjv.txt tokenizer.model kjv_train.bin kjv_val.bin; do
    mv "$work/$file" "$directory/$file"
done
echo "$vocabulary" >"$stamp"
sed "s|^$work/|$directory/|" "$work/log"
